"""Steps on their way: the next one is planned and launched before the host has heard which tokens the last
one chose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..kv.upload import Download, upload
from ..scheduling import UNKNOWN, Scheduler, SequenceGroup, Status, StepPlan, TokenSequence
from .forward_batch import LastTokens
from .job import Job
from .sampling.answers import Answer
from .sampling.input_batch import InputBatch
from .sampling.penalties import PenaltyState
from .sampling.sampler import SamplingRows, no_token, note_of, numbers_of, together


class _JobTokens(NamedTuple):
    """A job that gets tokens: at which position of its sequences, and where in the step's tokens each one's
    stands.
    """

    job: Job
    position: int
    places: list[tuple[TokenSequence, int]]


class InFlightStep:
    """A launched step. Its tokens are on the device, where the next step finds them, and on their way to the
    host.
    """

    def __init__(
        self,
        plan: StepPlan,
        failed: Collection[SequenceGroup],
        picks: Sequence[SamplingRows],
        answer: Answer,
        repeats: PenaltyState,
        begin: float = 0.0,
        roster: InputBatch | None = None,
    ) -> None:
        self.plan, self.failed, self.device, self.roster = plan, failed, answer.logits.device, roster
        self._repeats, self.begin = repeats, begin
        """When the host began to launch it."""
        self.tokens: torch.Tensor | None = None
        """[sequences]: those of the crew if it is told by a roster, then those of the picks."""
        self._crew: tuple[TokenSequence, ...] = () if roster is None else roster.sequences
        self._seats: list[_JobTokens] = []
        self._download: Download | None = None
        """The tokens, and what was noted about them."""
        self._heard: list[list[Any]] = []
        """The same on the host."""
        if picks or self._crew:
            self._assign(picks, answer)

    def _assign(self, picks: Sequence[SamplingRows], answer: Answer) -> None:
        tokens, told = self._choose(picks, answer)
        self.tokens = tokens  # until the host hears of it, a row of NaN goes on with some token that there is
        heard = [told]
        noted = [pick.job.asked.favourites is not None for pick in picks for _ in pick.rows]
        if any(noted):
            rows = [row for pick in picks for row in pick.rows]
            places = [len(self._crew) + place for place, wanted in enumerate(noted) if wanted]
            most = max(pick.job.asked.favourites or 0 for pick in picks)
            whose = upload([rows[place - len(self._crew)] for place in places], tokens.device)
            heard.append(
                numbers_of(
                    answer.logits[whose].log_softmax(-1), self.tokens[upload(places, tokens.device)], most
                )
            )
        self._download = Download(heard)
        place = len(self._crew)
        for pick in picks:
            assert pick.job.group is not None
            sequences = pick.job.group.sequences
            seats = list(zip(sequences, range(place, place + len(sequences)), strict=True))
            self._seats.append(_JobTokens(pick.job, len(sequences[0].tokens), seats))
            place += len(sequences)

    def _choose(self, picks: Sequence[SamplingRows], answer: Answer) -> torch.Tensor:
        """Tokens of the vocabulary, and what the host is told of them: [2, sequences], as `best` says it."""
        if self.roster is None or self.plan.stride is None:
            return together(picks, answer.logits, self._repeats)
        own = self.roster.choose(answer, self.plan.stride)
        return torch.cat([own, together(picks, answer.logits, self._repeats)], 1) if picks else own

    @cached_property
    def places(self) -> dict[TokenSequence, int]:
        """Where each sequence's token stands in `tokens`. Made when somebody asks: if nobody comes or goes,
        nobody does.
        """
        places = dict(zip(self._crew, range(len(self._crew)), strict=True))
        return places | {sequence: place for seats in self._seats for sequence, place in seats.places}

    @property
    def latest(self) -> LastTokens:
        """What the next step needs to know."""
        return LastTokens(self.tokens, self._crew, lambda: self.places)

    @property
    def jobs(self) -> list[Job]:
        """Whose tokens it brings, as far as they may end with them."""
        return [seats.job for seats in self._seats]

    def launch(self, scheduler: Scheduler) -> None:
        """Every sequence has its next token, whichever it is."""
        if self.roster is not None:
            self.roster.launch()
        for seats in self._seats:
            for sequence, _ in seats.places:
                scheduler.extend(sequence, UNKNOWN)

    def wait(self) -> bool:
        """Wait for the tokens; the answer is whether anybody may end with his, or lets somebody else's code
        decide that.
        """
        self._heard = [] if self._download is None else [each.tolist() for each in self._download.wait()]
        if not self._heard:
            return False
        tokens = self._heard[0]
        if (
            self.roster is not None
            and self.plan.stride is not None
            and self.roster.ends(self.plan.stride, tokens[: len(self._crew)])
        ):
            return True
        return any(
            job.asked.criteria
            or position + 1 >= job.asked.max_length
            or any(tokens[place] in job.asked.ends for _, place in places)
            for job, position, places in self._seats
        )

    def apply(self, scheduler: Scheduler) -> dict[Job, Exception]:
        """Give the tokens that have arrived to whoever is still there. The answer is who failed, and why."""
        scheduler.confirm(self.plan, self.failed)
        tokens: list[int] = self._heard[0] if self._heard else []
        notes = iter(self._heard[1] if len(self._heard) > 1 else [])
        self._seats += self._reveal(tokens, scheduler)
        failed: dict[Job, Exception] = {}
        for job, position, places in self._seats:
            group, favourites = job.group, job.asked.favourites
            noted = (
                None
                if favourites is None
                else {sequence: note_of(next(notes), tokens[place], favourites) for sequence, place in places}
            )
            if group is None or group.status is Status.FINISHED:
                continue
            # Who ended in the step before has got a token too many.
            heard = {sequence: tokens[place] for sequence, place in places if sequence in group.sequences}
            if UNKNOWN in heard.values():
                failed[job] = no_token(job)
                continue
            try:
                job.reveal(scheduler, position, heard, noted, self.device)
            except Exception as error:  # a criterion or a tokenizer of this request; its neighbours go on
                failed[job] = error
        return failed

    def _reveal(self, tokens: list[int], scheduler: Scheduler) -> list[_JobTokens]:
        """Tell the crew; the answer is who of it has to be looked at."""
        stride, roster = self.plan.stride, self.roster
        if roster is None or stride is None:
            return []
        odd = roster.reveal(stride, tokens[: len(self._crew)], scheduler.crew.stands(stride))
        return [
            _JobTokens(
                roster.jobs[place], stride.starts[place] + stride.step + 1, [(self._crew[place], place)]
            )
            for place in odd
        ]
