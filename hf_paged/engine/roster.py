"""The jobs of the crew: what is asked for each of them in every step, found once for as long as nobody joins or leaves."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..memory.upload import upload
from ..scheduling import Group, Sequence, Status, Stride
from .job import Job
from .sampling import Warp, draw, warp


class Roster:
    """The jobs of a crew by its places. Each has one sequence, whose next token needs nothing but a cut and a draw, and which ends by a
    token or by its length."""

    def __init__(self, sequences: tuple[Sequence, ...], jobs: Mapping[Group, Job]) -> None:
        self.sequences = sequences
        self.jobs = [jobs[sequence.group] for sequence in sequences]
        self._said = [job.streams[0].so_far for job in self.jobs]
        self._ends = [job.asked.ends for job in self.jobs]
        self._news = [job.news for job in self.jobs]
        self._drawn = [place for place, job in enumerate(self.jobs) if job.asked.sampled]
        self._seeds = [self.jobs[place].asked.seed for place in self._drawn]
        self._warps = [self.jobs[place].asked.warp or Warp() for place in self._drawn]

    def choose(self, logits: torch.Tensor, stride: Stride) -> tuple[torch.Tensor, torch.Tensor]:
        """The crew's next tokens by logits [crew, vocabulary], and whether they have NaN among them. Nobody waits for the device."""
        tokens = logits.argmax(-1)
        broken = logits.gather(1, tokens[:, None])[:, 0].isnan()  # to torch NaN is the largest number
        if self._drawn:
            every = len(self._drawn) == len(self.jobs)
            places = None if every else upload(self._drawn, logits.device)
            indices = [self.sequences[place].index for place in self._drawn]
            positions = [stride.starts[place] + stride.step + 1 for place in self._drawn]
            drawn = draw(warp(logits if places is None else logits[places], self._warps), self._seeds, indices, positions)
            if places is None:
                return drawn, broken
            tokens[places] = drawn
        return tokens, broken

    def hear(self, stride: Stride, tokens: list[int]) -> list[int]:
        """Give everybody who goes on the token that he got in a stride. The answer is the places of all others: who ends with it, has no
        token, or does not run any more."""
        position, last, odd = stride.step + 1, frozenset(stride.last), []
        rows = zip(self.sequences, stride.starts, self._said, self._ends, self._news, tokens, strict=True)
        for place, (sequence, start, said, ends, news, token) in enumerate(rows):
            if token < 0 or token in ends or place in last or sequence.group.status is not Status.RUNNING:
                odd.append(place)
                continue
            sequence.tokens[start + position] = token
            said.append(token)
            if news.readers:
                news.tell()
        return odd
