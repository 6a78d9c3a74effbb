"""One step after another: its plan, its forward, its tokens, and who ends with it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..scheduling import DecodeRows, ScheduledRow, Scheduler, SequenceGroup, Status, StepPlan
from .check_policy import WeightsChanged
from .forward_batch import ForwardBatch, LastTokens
from .in_flight import InFlightStep
from .job import Job
from .model_check import ModelCheck
from .multimodal.media import Media
from .outputs.output import FinishReason, Output
from .own_code import raised_by, reaches_driver
from .pools import Pools
from .preemption import Preemption
from .recorder import Recorder
from .requests.params import RequestParams
from .runner import Runner
from .sampling.answers import Answer
from .sampling.input_batch import InputBatch
from .sampling.penalties import PenaltyState
from .sampling.sampler import Sampler, SamplingRows


class _Computed(NamedTuple):
    """What came of a plan: who failed and why, the answer for the rows that somebody waits for, and these
    rows.

    With a roster the first of it is for its sequences, which are not among the rows.
    """

    failed: dict[SequenceGroup, Exception]
    answer: Answer
    rows: list[ScheduledRow]
    roster: InputBatch | None = None


class Steps:
    """Carries out what the scheduler plans, and lets every job know.

    With `ahead` a step is launched before the host has heard of the last one's tokens: the device never
    waits. Who turns out to have ended has then computed one token too many, which nobody sees. A job that
    needs the host for its next token (beams, processors) is heard at once, and the device waits for its
    tokens only: what there is to do about everybody else's is done while it computes.
    """

    def __init__(
        self,
        pools: Pools,
        runner: Runner,
        model_check: ModelCheck,
        scheduler: Scheduler,
        jobs: dict[SequenceGroup, Job],
        preemption: Preemption,
        ahead: bool,
    ) -> None:
        self.pools, self.runner, self.scheduler, self.jobs, self.ahead = pools, runner, scheduler, jobs, ahead
        self.model_check, self.preemption = model_check, preemption
        self.flight: InFlightStep | None = None
        """The step that is on its way."""
        self._given: dict[SequenceGroup, RequestParams] = {}
        """Requests whose rows are more than token ids."""
        self._roster: InputBatch | None = None
        """The crew's, as it was last."""
        self._repeats = PenaltyState()
        self.interrupted: deque[Job] = deque()
        """Requests that have ended with what is meant for their driver as well."""
        self.recorder: Recorder | None = None
        """Who writes down what happens, if anybody does."""

    def enter(self, job: Job) -> None:
        """A request is in the scheduler's books."""
        assert job.group is not None
        if not job.asked.of_ids:
            self._given[job.group] = job.asked
        self.jobs[job.group] = job

    def go_on(self) -> list[Output]:
        """The next step; the answer is whose requests have ended."""
        ended: list[Output] = []
        plan = self.scheduler.schedule() if self.jobs else StepPlan()
        self.pools.cover()
        self.pools.swap(plan.swaps)  # whoever had to go is on the way, even if nobody is left who has a row
        if not plan:
            if self.jobs and self.flight is None:
                raise RuntimeError(
                    f"none of {self.scheduler.unfinished} requests can run: the engine's books are broken"
                )
            return ended + self.finish_in_flight()
        if self.recorder is not None:
            self.recorder.planned(plan)
        for group in plan.admitted:
            timing = self.jobs[group].timing
            timing.started = timing.started or time.monotonic()
        begin = time.perf_counter()
        failed, answer, rows, roster = self._compute(plan)
        self.scheduler.launch(plan, failed)
        picks, flight = self._picks(rows, 0 if roster is None else len(roster.sequences)), self.flight
        late = [pick for pick in picks if self.ahead and pick.job.plain]
        self.flight = InFlightStep(plan, failed, late, answer, self._repeats, begin, roster)
        self.flight.launch(self.scheduler)
        picks = [pick for pick in picks if not (self.ahead and pick.job.plain)]
        choice = Sampler(picks, answer.logits, self._repeats)
        ended += self._settle(flight) if self.ahead else self.finish_in_flight()
        if picks:
            self.look()
            self.runner.checks.mark_dirty()  # to their processors and criteria
        trouble = choice.apply(self.scheduler) | {
            self.jobs[group]: error for group, error in failed.items() if group in self.jobs
        }
        ended += [self.end(job, "error", error) for job, error in trouble.items()]
        return ended + [self.end(pick.job) for pick in picks if _is_over(pick.job)]

    def finish_in_flight(self) -> list[Output]:
        """Hear of the tokens of the step that is on its way; the answer is what ended in it."""
        flight, self.flight = self.flight, None
        return self._settle(flight)

    def _settle(self, flight: InFlightStep | None) -> list[Output]:
        if flight is None:
            return []
        if flight.wait():
            self.look()
            self.runner.checks.mark_dirty()
        trouble = flight.apply(self.scheduler)
        self.preemption.heard(flight.plan, flight.begin)
        ended = [self.end(job, "error", error) for job, error in trouble.items()]
        return ended + [self.end(job) for job in flight.jobs if _is_over(job)]

    def look(self) -> None:
        """Before anybody ends, or somebody else's code runs: see whether the model is what it was, if this
        step has not seen it.
        """
        if self.runner.checks.unseen:
            self.model_check.require_untouched(len(self.scheduler.running))
            self.runner.look()

    def start_over(self, error: BaseException) -> None:
        """Something broke into the middle of a step. What was computed is not known, so nobody holds anything
        any more.

        Who is whole is computed again; of whose sequences only some have their token, ends here, and so does
        everybody whose tokens may be of two models.
        """
        self.flight = self._roster = None
        self.forget()
        self._repeats.clear()
        spoiled = isinstance(error, WeightsChanged)
        for job in self.jobs.values():
            job.go_back()
        for shelf in self.pools.shelves:
            shelf.pool.recover()
            if shelf.host is not None:
                shelf.host.recover()
        self.scheduler.start_over(self.jobs)
        for group in self._given.keys() - self.jobs.keys():
            self._given.pop(group, None)
        for group, job in list(self.jobs.items()):
            if job.beams is not None and job.beams.standing.done and job.output is None:
                job.conclude_beams()
            if job.output is not None:
                job.news.end()
                self._drop(group, job)
            elif job.said:
                self.end(job)
            elif (
                group.status is Status.FINISHED or job.torn or (spoiled and group.status is Status.PREEMPTED)
            ):
                self.end(
                    job,
                    "error",
                    error if isinstance(error, Exception) else RuntimeError("a step broke off in the middle"),
                )

    def _compute(self, plan: StepPlan) -> _Computed:
        """Carry out a plan behind its swaps."""
        self.pools.copy(plan.copies)
        try:
            answer = self._run(plan)
        except Exception as error:
            if len(plan.groups) == 1:
                return _Computed({plan.groups[0]: error}, _nothing(), [])
            # One of them broke the forward of all: each is tried by itself, on the same blocks.
            return self._compute_apart(plan)
        roster = None if plan.stride is None else self._roster_of(plan.stride)
        return _Computed(
            {}, answer, [row for row in (plan.rows if roster is None else plan.others) if row.samples], roster
        )

    def _compute_apart(self, plan: StepPlan) -> _Computed:
        failed: dict[SequenceGroup, Exception] = {}
        logits, rows = [], []
        for group in plan.groups:
            own = tuple([row for row in plan.rows if row.sequence.group is group])
            try:
                found = self._run(StepPlan(own))
            except Exception as error:
                failed[group] = error
                continue
            logits.append(found.logits.clone())  # the next run may write over them
            rows += [row for row in own if row.samples]
        return _Computed(failed, Answer(torch.cat(logits)) if rows else _nothing(), rows)

    def _roster_of(self, stride: DecodeRows) -> InputBatch:
        if self._roster is None or self._roster.sequences is not stride.sequences:
            self._roster = InputBatch(stride.sequences, self.jobs, self._repeats)
        return self._roster

    def _run(self, plan: StepPlan) -> Answer:
        """Compute the rows of a plan: the answer for those that somebody waits for."""
        latest = LastTokens() if self.flight is None else self.flight.latest
        shown = self._show(plan) if self._given else []
        logits = self.runner.run(ForwardBatch(plan, latest, self._given), latest.tokens)
        for media in shown:
            media.forget_spent()
        return logits

    def _show(self, plan: StepPlan) -> list[Media]:
        """Have the model look at the pictures of prompts whose turn it is; the answer is those with which it
        is done after this step.
        """
        done = []
        for sequence, start, count, _ in plan.others:
            asked = self._given.get(sequence.group)
            media = None if asked is None else asked.media
            if media is None:
                continue
            if media.shift is None:
                self.runner.merger.recall(media)  # by now somebody else may have brought the same
            if media.due(start, count, sequence.begun):
                self.runner.show(media)
            if media.shift:
                sequence.group.scatter()
            if media.spent(start, count):
                done.append(media)
        return done

    def forget(self) -> None:
        """What was made of pictures, by the weights of then, is made again."""
        for asked in self._given.values():
            if asked.media is not None:
                asked.media.forget()

    def _picks(self, rows: Sequence[ScheduledRow], first: int = 0) -> list[SamplingRows]:
        """The jobs that are due, with the places of their sequences' logits, which begin with number
        `first`.
        """
        picks: dict[SequenceGroup, list[int]] = {}
        for place, row in enumerate(rows, first):
            picks.setdefault(row.sequence.group, []).extend([place] * len(row.samples))
        return [SamplingRows(self.jobs[group], places) for group, places in picks.items()]

    def end(self, job: Job, reason: FinishReason | None = None, error: BaseException | None = None) -> Output:
        """End a request, in whatever state it is."""
        group = job.group
        assert group is not None
        if error is not None:
            self._disown(group)
        self.scheduler.abort(group)
        output = self.conclude(job, reason, error)
        self._drop(group, job)  # not before there is an output: an interrupt may come in between
        if self.recorder is not None:
            self.recorder.ended(group.request.number, output.finish_reason)
        return output

    def conclude(self, job: Job, reason: FinishReason | None, error: BaseException | None = None) -> Output:
        """Make the output of a request. Its tokenizer may raise in here, which is its own trouble."""
        output = job.close(reason, None if error is None else raised_by(error))
        if reaches_driver(output.error):
            self.interrupted.append(job)
        return output

    def _drop(self, group: SequenceGroup, job: Job) -> None:
        """Forget a request that has its output. Twice is once."""
        self.jobs.pop(group, None)
        self._given.pop(group, None)
        self._repeats.drop(group)
        if job.asked.source is not None:
            job.asked.source.made = None

    def _disown(self, group: SequenceGroup) -> None:
        """What a failed request has computed is found by nobody: it may be what failed."""
        for sequence in group.sequences:
            for table in sequence.tables:
                for block in table.blocks:
                    table.pool.withdraw(block)


def _is_over(job: Job) -> bool:
    return job.group is not None and job.group.status is Status.FINISHED


def _nothing() -> Answer:
    """The answer for nobody."""
    return Answer(torch.empty(0, 0, dtype=torch.float32, device="cpu"))
