"""One step after another: its plan, its forward, its tokens, and who ends with it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Rows

import torch

from ..scheduling import UNKNOWN, Group, Plan, Row, Scheduler, Sequence, Status
from .asking import Asked
from .chooser import Choice, Pick
from .flight import Flight
from .job import Job
from .output import FinishReason, Output
from .pools import Pools
from .preemption import Preemption
from .recorder import Recorder
from .runner import Piece, Runner


class Steps:
    """Carries out what the scheduler plans, and lets every job know.

    With `ahead` a step is launched before the host has heard of the last one's tokens: the device never waits. Who turns out to have ended
    has then computed one token too many, which nobody sees. A job that needs the host for its next token (beams, processors) is heard
    at once, and the device waits for its tokens only: what there is to do about everybody else's is done while it computes.
    """

    def __init__(
        self, pools: Pools, runner: Runner, scheduler: Scheduler, jobs: dict[Group, Job], preemption: Preemption, ahead: bool
    ) -> None:
        self.pools, self.runner, self.scheduler, self.jobs, self.ahead = pools, runner, scheduler, jobs, ahead
        self.preemption = preemption
        self.flight: Flight | None = None
        """The step that is on its way."""
        self._given: dict[Group, Asked] = {}
        """Requests whose rows are more than token ids."""
        self.recorder: Recorder | None = None
        """Who writes down what happens, if anybody does."""

    def enter(self, job: Job) -> None:
        """A request is in the scheduler's books."""
        assert job.group is not None
        self.jobs[job.group] = job
        if job.asked.embeds is not None or job.asked.source is not None:
            self._given[job.group] = job.asked

    def go_on(self) -> list[Output]:
        """The next step; the answer is whose requests have ended."""
        ended: list[Output] = []
        plan = self.scheduler.schedule() if self.jobs else Plan()
        self.pools.swap(plan.swaps)  # whoever had to go is on the way, even if nobody is left who has a row
        if not plan.rows:
            if self.jobs and self.flight is None:
                raise RuntimeError(f"none of {self.scheduler.unfinished} requests can run: the engine's books are broken")
            return ended + self.land()
        if self.recorder is not None:
            self.recorder.planned(plan)
        for group in plan.admitted:
            timing = self.jobs[group].timing
            timing.started = timing.started or time.monotonic()
        begin = time.perf_counter()
        failed, logits, rows = self._compute(plan)
        self.scheduler.launch(plan, failed)
        picks, flight = self._picks(rows), self.flight
        if self.ahead:
            self.flight = Flight(plan, failed, [pick for pick in picks if pick.job.plain], logits, begin)
            self.flight.depart(self.scheduler)
            picks = [pick for pick in picks if not pick.job.plain]
        choice = Choice(picks, logits)
        ended += self._settle(flight)
        if not self.ahead:
            self.scheduler.confirm(plan, failed)
        trouble = choice.land(self.scheduler) | {self.jobs[group]: error for group, error in failed.items() if group in self.jobs}
        if not self.ahead:
            self.preemption.heard(plan, begin)
        ended += [self.end(job, "error", error) for job, error in trouble.items()]
        return ended + [self.end(pick.job) for pick in picks if _is_over(pick.job)]

    def land(self) -> list[Output]:
        """Hear of the tokens of the step that is on its way; the answer is what ended in it."""
        flight, self.flight = self.flight, None
        return self._settle(flight)

    def _settle(self, flight: Flight | None) -> list[Output]:
        if flight is None:
            return []
        trouble = flight.land(self.scheduler)
        self.preemption.heard(flight.plan, flight.begin)
        ended = [self.end(job, "error", error) for job, error in trouble.items()]
        return ended + [self.end(job) for job in flight.jobs if _is_over(job)]

    def start_over(self, error: BaseException) -> None:
        """Something broke into the middle of a step. What was computed is not known, so nobody holds anything any more.

        Who is whole is computed again; of whose sequences only some have their token, ends here.
        """
        self.flight = None
        for job in self.jobs.values():
            job.go_back()
        for shelf in self.pools.shelves:
            shelf.pool.recover()
            if shelf.host is not None:
                shelf.host.recover()
        self.scheduler.start_over(self.jobs)
        for group, job in list(self.jobs.items()):
            if job.said:
                self.end(job)
            elif group.status is Status.FINISHED or job.torn:
                self.end(job, "error", error if isinstance(error, Exception) else RuntimeError("a step broke off in the middle"))

    def _compute(self, plan: Plan) -> tuple[dict[Group, Exception], torch.Tensor, list[Row]]:
        """Carry out a plan behind its swaps: who failed and why, and the logits [rows, vocabulary] of the rows that somebody waits for."""
        self.pools.copy(plan.copies)
        try:
            return {}, self._run(plan.rows), [row for row in plan.rows if row.samples]
        except Exception as error:
            if len(plan.groups) == 1:
                return {plan.groups[0]: error}, torch.empty(0, 0), []
            # One of them broke the forward of all: each is tried by itself, on the same blocks.
            return self._compute_apart(plan)

    def _compute_apart(self, plan: Plan) -> tuple[dict[Group, Exception], torch.Tensor, list[Row]]:
        failed: dict[Group, Exception] = {}
        logits, rows = [], []
        for group in plan.groups:
            own = [row for row in plan.rows if row.sequence.group is group]
            try:
                found = self._run(own)
            except Exception as error:
                failed[group] = error
                continue
            logits.append(found.clone())  # the next run may write over them
            rows += [row for row in own if row.samples]
        return failed, torch.cat(logits) if rows else torch.empty(0, 0), rows

    def _run(self, rows: Rows[Row]) -> torch.Tensor:
        """Compute rows: the logits [rows, vocabulary] of those that somebody waits for."""
        flight = self.flight
        places = {} if flight is None else flight.places
        given = self._given
        pieces = [_piece(*row, places, given.get(row.sequence.group) if given else None) for row in rows]
        return self.runner.run(pieces, None if flight is None else flight.tokens)

    def _picks(self, rows: Rows[Row]) -> list[Pick]:
        """The jobs that are due, with the places of their sequences' logits."""
        picks: dict[Group, list[int]] = {}
        for place, row in enumerate(rows):
            picks.setdefault(row.sequence.group, []).extend([place] * len(row.samples))
        return [Pick(self.jobs[group], places) for group, places in picks.items()]

    def end(self, job: Job, reason: FinishReason | None = None, error: Exception | None = None) -> Output:
        """End a request, in whatever state it is."""
        group = job.group
        assert group is not None
        if error is not None:
            self._disown(group)
        self.scheduler.abort(group)
        output = job.close(reason, error)
        del self.jobs[group]  # not before there is an output: an interrupt may come in between
        self._given.pop(group, None)
        if job.asked.source is not None:
            job.asked.source.made = None
        if self.recorder is not None:
            self.recorder.ended(group.request.number, output.finish_reason)
        return output

    def _disown(self, group: Group) -> None:
        """What a failed request has computed is found by nobody: it may be what failed."""
        for sequence in group.sequences:
            for table in sequence.tables:
                for block in table.blocks:
                    table.pool.withdraw(block)


def _piece(
    sequence: Sequence,
    start: int,
    count: int,
    samples: Collection[Sequence],
    places: Mapping[Sequence, int],
    asked: Asked | None,
) -> Piece:
    """A row for the runner.

    places: where in the last step's tokens those stand that the host has not heard of. asked: the request, if its rows are more than ids.
    """
    tokens = sequence.tokens[start : start + count]
    piece = Piece(tokens, start, sequence.tables, bool(samples), places[sequence] if tokens[-1] == UNKNOWN else None)
    if asked is None:
        return piece
    embeds = asked.embeds
    own = embeds[start : start + count] if embeds is not None and start < len(embeds) else None
    return piece._replace(embeds=own, source=asked.source)


def _is_over(job: Job) -> bool:
    return job.group is not None and job.group.status is Status.FINISHED
