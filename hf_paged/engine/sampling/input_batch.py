"""The jobs of the crew: what is asked for each of them in every step, found once for as long as nobody joins
or leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import repeat

import torch

from ...scheduling import UNKNOWN, DecodeRows, SequenceGroup, TokenSequence
from ..job import Job
from .answers import Answer
from .penalties import PenaltyState
from .selection import Selection


class InputBatch:
    """The jobs of a crew by its places. Each has one sequence, whose next token needs nothing but a cut and a
    draw, and which ends by a token or by its length."""

    def __init__(
        self, sequences: tuple[TokenSequence, ...], jobs: Mapping[SequenceGroup, Job], repeats: PenaltyState
    ) -> None:
        self.sequences = sequences
        self.jobs = [jobs[sequence.group] for sequence in sequences]
        self._rows = [sequence.tokens for sequence in sequences]
        self._said = [job.streams[0].so_far for job in self.jobs]
        self._readers = [job.news.readers for job in self.jobs]
        self._ends = [job.asked.ends for job in self.jobs]
        self._any_end = frozenset([UNKNOWN]).union(*set(self._ends))
        self._selection = Selection(list(zip(self.jobs, sequences, strict=True)), repeats)

    def choose(self, answer: Answer, stride: DecodeRows) -> torch.Tensor:
        """The crew's next tokens, whose logits come first in an answer, and what the host is told of them:
        [2, crew], as `best` says it. Nobody waits for the device."""
        crew = len(self.jobs)
        positions = [start + stride.step + 1 for start in stride.starts]
        known = None if answer.best is None else answer.best[:, :crew]
        return self._selection.choose(answer.logits[:crew], positions, known)

    def launch(self) -> None:
        """Everybody has a next token, whichever it is."""
        _exhaust(map(list.append, self._rows, repeat(UNKNOWN)))

    def ends(self, stride: DecodeRows, tokens: list[int]) -> bool:
        """Whether anybody ends with the token that he got in a stride."""
        return bool(stride.last) or bool(self._who_stopped(tokens))

    def reveal(self, stride: DecodeRows, tokens: list[int], whole: bool) -> list[int]:
        """Give everybody who goes on the token that he got in a stride. The answer is the places of all
        others: who ends with it, has no token, or has left the crew since. whole: whether surely nobody has.
        """
        odd = {*stride.last, *self._who_stopped(tokens)}
        if not whole:
            odd.update([place for place, sequence in enumerate(self.sequences) if sequence.place is None])
        rows, said, position = self._rows, self._said, stride.step + 1
        positions = [start + position for start in stride.starts]
        if odd:
            here = [place for place in range(len(rows)) if place not in odd]
            rows, said = [rows[place] for place in here], [said[place] for place in here]
            positions, tokens = [positions[place] for place in here], [tokens[place] for place in here]
        # All that is left to be done for every row in every step: two numbers are written down.
        for row, place, token in zip(rows, positions, tokens, strict=True):
            row[place] = token
        _exhaust(map(list.append, said, tokens))
        if any(self._readers):
            for job in self.jobs:
                job.news.put()
        return sorted(odd)

    def _who_stopped(self, tokens: list[int]) -> list[int]:
        if self._any_end.isdisjoint(tokens):
            return []
        return [
            place
            for place, (token, ends) in enumerate(zip(tokens, self._ends, strict=True))
            if token == UNKNOWN or token in ends
        ]


def _exhaust(calls: Iterable[None]) -> None:
    """Make calls that answer nothing."""
    deque(calls, maxlen=0)
