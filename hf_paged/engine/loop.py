"""The engine's loop: step after step, from the plan to the tokens and the requests that end with them."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..blocks import NO_NUMBERS, ROPE_DELTA
from ..kv.checksums import CorruptedBlock
from ..model.state_slots import StatesAdvanced
from ..scheduling import Request, ScheduledBatch, Scheduler, SequenceGroup, Status, StepPlan
from ..trace import Step, Trace, Writer
from .host_sampler import HostSampler
from .in_flight import InFlightStep, SamplingState
from .multimodal.cross import CrossMedia
from .multimodal.media import Media, rope_delta_filler
from .outputs.output import FinishReason, Output
from .parallel.ranks import RankError
from .preemption import Preemption
from .recorder import Recorder
from .requests.job import Job
from .requests.own_code import raised_by, reaches_driver
from .requests.params import RequestParams
from .worker.adapters import EngineAdapters
from .worker.check_policy import WeightsChanged
from .worker.executor import EngineParts, Executor
from .worker.forward_batch import Answer, ForwardBatch, LastTokens, RowInputs, inputs_of
from .worker.model_check import ModelCheck
from .worker.runner import Runner

ENDED = "the request has ended and no other one finds the block; submit it again"
SLACK = 0.02
"""Seconds that the host waits for a step, if it has time to capture another beside one like it."""


class RunsApart(NamedTuple):
    """The requests of a step, each run by itself."""

    batch: ScheduledBatch
    """The computed rows."""
    answer: Answer
    """Their logits."""
    failed: dict[SequenceGroup, Exception]
    lost: list[SequenceGroup]
    """Groups whose states a run that broke off may have advanced: they are computed again."""


class StepLoop:
    """Carries out what the scheduler plans, and gives requests their tokens.

    With `ahead` a step is launched before the host has the tokens of the one before: the device never waits.
    A sequence that turns out to have ended has then computed one token too many, which is dropped. A request
    that needs the host for its next token (beams, processors) gets it at once: the device waits for these
    tokens only, and all other work on the host is done before.
    """

    def __init__(
        self,
        executor: Executor,
        runner: Runner,
        model_check: ModelCheck,
        scheduler: Scheduler,
        preemption: Preemption,
        adapters: EngineAdapters,
    ) -> None:
        self.executor = executor
        self.runner = runner
        self.pools = runner.eager.pools
        self.adapters = adapters
        self.scheduler = scheduler
        self.jobs: dict[SequenceGroup, Job] = {}
        ahead = self.pools.config.run_ahead
        self.ahead = runner.eager.device.type == "cuda" if ahead is None else ahead
        self.model_check = model_check
        self.preemption = preemption
        self.in_flight: InFlightStep | None = None
        self.interrupted: deque[Job] = deque()
        """Requests that have ended with an exception that their driver must raise."""
        self.recorders: list[Recorder] = []
        """Recorders that write a trace, or report to a map of the blocks."""
        self._suspects: set[SequenceGroup] = set()
        """Groups that are computed again since a step with them broke off: each runs by itself until it has
        got further.
        """
        self._sampling = SamplingState(self.jobs, LastTokens(scheduler.limits.sequences, runner.eager.device))
        self.with_inputs: dict[SequenceGroup, RequestParams] = {}
        """Requests whose rows are more than token ids, or are scored."""
        self.slow: Counter[str] = Counter()
        """The number of requests with a processor that runs for their rows alone, by its name."""
        self._wait = 0, 0.0
        """The tokens of the last step beside which nothing was captured, and the seconds that the host waited
        for it.
        """
        self._captures = None if runner.captured is None else runner.captured.captures
        self._captured = 0.0
        """Their seconds until then."""
        last_tokens = self._sampling.last_tokens
        executor.begin(EngineParts(runner, adapters, model_check, last_tokens, self.with_inputs))

    def enter(self, job: Job, request: Request) -> None:
        """Enter a request in the books; raises Infeasible if it could never fit."""
        group = job.group = self.scheduler.submit(request)
        if not job.params.of_ids or job.prompt_scores is not None:
            self.with_inputs[group] = job.params
        self.jobs[group] = job
        if job.params.return_routing:
            self.pools.record_routing()
            job.routing_of = self.pools.routing_of
        self.adapters.fresh |= bool(job.adapter)
        self.slow.update(set(job.params.slow))

    def record(
        self, sink: Writer | Callable[[Step], None], header: Trace, lock: Any, every: float | None
    ) -> Recorder:
        """Write every step from now on to a trace, or report to a map of the blocks every so many seconds."""
        made = Recorder(sink, self.scheduler, header, lock, every)
        self.recorders = [*(each for each in self.recorders if not each.closed), made]
        return made

    # ---- a step

    def step(self) -> list[Output]:
        """Plan and launch a step, then apply the tokens of the one before: the requests that have ended."""
        ended: list[Output] = []
        if not self.scheduler.running:
            ended = self.finish_in_flight()  # nothing is left to run ahead of
            self.executor.expect([*self.scheduler.preempted, *self.scheduler.waiting])
        plan = self.scheduler.schedule()
        checks = self.pools.checks
        if plan.takes_blocks or (checks.groups and checks.due):
            self.executor.prepare(plan)
        ended += self._end_unloadable() if self.adapters.failed else []
        if not plan.batch.sequences:
            return ended + (self.finish_in_flight() if ended else self._idle())
        if plan.admitted or self.recorders:
            self._note(plan)
        begin = time.perf_counter()
        batch = plan.batch
        failed: dict[SequenceGroup, Exception] = {}
        lost: list[SequenceGroup] = []
        if self._suspects and not self._suspects.isdisjoint(plan.groups):
            batch, answer, failed, lost = self._run_apart(plan)
        else:
            try:
                answer = self._run(batch)
            except RankError:  # there is no rank to try requests with
                raise
            except Exception as error:
                batch, answer, failed, lost = self._run_apart(plan, error)
        self.scheduler.launch(plan, {*failed, *lost} if lost else failed)
        for group in lost:
            self.scheduler.preempt(group, swap=False)
        previous = self.in_flight
        step = self.in_flight = InFlightStep(plan, batch, answer, failed, lost, begin, self._sampling)
        step.sample()
        tokens, waited = self._wait
        # Who samples on the host may read its logits later, where a capture that fails would write.
        if waited > SLACK and step.batch.tokens >= tokens and step.host is None:
            self.executor.capture_ahead(self.scheduler.unfinished)
        ended += self._apply(previous) if self.ahead else self.finish_in_flight()
        if step.host is not None or step.failed:
            step.note_prompts(self.scheduler)  # a request may end with its token
            ended += self._apply(step.host, step.failed)
        return ended

    def finish_in_flight(self) -> list[Output]:
        """Apply the tokens of the step in flight: the requests that have ended with it."""
        step = self.in_flight
        self.in_flight = None
        return self._apply(step)

    def _idle(self) -> list[Output]:
        if self.jobs and self.in_flight is None and not self.adapters.wait():
            raise RuntimeError(
                f"none of {self.scheduler.unfinished} requests can run: the engine's bookkeeping is "
                "wrong, please report this"
            )
        return self.finish_in_flight()

    def _note(self, plan: StepPlan) -> None:
        """Record a plan in traces, and the start of the requests that it admits."""
        for recorder in self.recorders:
            recorder.planned(plan)
        for group in plan.admitted:
            job = self.jobs[group]
            job.timing.started = job.timing.started or time.monotonic()
            if job.prompt_scores is not None:
                job.prompt_scores.recall(self.scheduler.prefixes.scores, group.prompt, group.leader.computed)

    def _run_apart(self, plan: StepPlan, error: Exception | None = None) -> RunsApart:
        """Run each request of a step by itself, on the same blocks. error: why the step has failed; None if
        it has not run.

        A request whose states the failed run may have advanced cannot run again: it begins again, and runs by
        itself until it is where the step failed.
        """
        done: list[int] = []
        logits: list[torch.Tensor] = []
        scores: dict[int, torch.Tensor] = {}
        failed: dict[SequenceGroup, Exception] = {}
        lost: list[SequenceGroup] = []
        if error is not None and len(plan.groups) == 1 and not isinstance(error, StatesAdvanced):
            failed[plan.groups[0]] = error
        for group in plan.groups if not failed else ():
            own = [i for i, sequence in enumerate(plan.batch.sequences) if sequence.group is group]
            try:
                answer = self._run(plan.batch.select(own))
                logits.append(answer.logits.clone())  # the next run may overwrite it
                scores |= answer.scores
                done += own
                if any(plan.batch.samples[i] for i in own):
                    self._suspects.discard(group)
            except RankError:
                raise
            except Exception as trouble:
                if isinstance(trouble, StatesAdvanced) and group not in self._suspects:
                    lost.append(group)
                else:
                    failed[group] = trouble
        self._suspects.update(lost)
        rows = [each for each in logits if len(each)]
        empty = torch.empty(0, 0, dtype=torch.float32, device="cpu")
        answer = Answer(torch.cat(rows) if rows else empty, scores=scores)
        return RunsApart(plan.batch.select(done), answer, failed, lost)

    def _run(self, batch: ScheduledBatch) -> Answer:
        """The logits behind the rows that are sampled from."""
        shown = self._encode_media(batch) if self.with_inputs else []
        inputs = self._inputs(batch) if self.with_inputs else {}
        unseen = () if self.in_flight is None else self.in_flight.sequences
        fillers = self.runner.fillers
        columns = fillers.of(batch.sequences) if fillers.by_name else NO_NUMBERS
        forward = ForwardBatch(batch, self._sampling.last_tokens, inputs=inputs, columns=columns)
        if batch.sequences != unseen or batch.decodes < len(unseen):  # else the device has all ids
            forward = ForwardBatch.planned(batch, forward.last_tokens, inputs, columns, unseen)
        answer = self.executor.run(forward)
        for media in shown:
            media.forget_spent()
            fillers.renew(ROPE_DELTA.name)  # of the tokens behind it
        return answer

    def _apply(
        self,
        tokens: InFlightStep | HostSampler | None,
        failed: Mapping[SequenceGroup, Exception] | None = None,
    ) -> list[Output]:
        """Give requests their tokens, and end those that are done or failed: their outputs.

        Code of requests (processors, criteria, tokenizers) runs in here and in no other part of a step: the
        model is checked before it, and marked for a check after it.
        """
        trouble: dict[Job, Exception] = {}
        jobs: list[Job] = []
        ended: list[Output] = []
        step = tokens if isinstance(tokens, InFlightStep) else None
        if tokens is not None:
            changed: set[str] = set()
            begin = time.monotonic()
            wait = self.executor.wait if tokens is step else self.executor.wait_whole
            may_end = wait(tokens.wait)
            if step is not None and self.ahead and self._captures is not None:
                if self._captures.seconds == self._captured:
                    self._wait = step.batch.tokens, time.monotonic() - begin
                self._captured = self._captures.seconds
            if may_end:
                changed = self._changed_adapters() if self.runner.eager.checks.unseen else changed
                self.check_model()
                self.runner.eager.checks.mark_dirty()
            if self.pools.checks.groups:
                ended += self._end_corrupted()
            trouble = tokens.apply(self.scheduler)
            if self.pools.checks.groups:
                self.executor.seal()
            jobs = tokens.jobs
            trouble |= {job: _mixed(job, changed) for job in jobs if changed.intersection(job.adapter)}
        if step is not None:
            arrived = time.perf_counter()
            if step.plan.takes_blocks:  # groups are preempted for want of blocks
                self.preemption.measure(step.plan, arrived - step.begin)
            if self.in_flight is not None:
                self.in_flight.begin = arrived
        for group, error in (failed or {}).items():
            if group in self.jobs:
                trouble[self.jobs[group]] = error
        ended += [self.end(job, "error", error) for job, error in trouble.items() if job.output is None]
        over = [job for job in jobs if job.group is not None and job.group.status is Status.FINISHED]
        return ended + [self.end(job) for job in over]

    def _end_corrupted(self) -> list[Output]:
        """End the requests that hold a corrupted block, before they get a token that comes of it."""
        checks = self.pools.checks
        if not self.executor.wait(checks.found):
            return []
        found = {job: checks.held_by(group) for group, job in self.jobs.items()}
        checks.settle()
        return [
            self.end(job, "error", CorruptedBlock.of(each, f"the answer of request {job.number}", ENDED))
            for job, each in found.items()
            if each is not None
        ]

    def _end_unloadable(self) -> list[Output]:
        """End the requests whose adapters could not be loaded."""
        failed = self.adapters.take_failed()
        jobs = [job for job in self.jobs.values() if job.adapter in failed]
        return [self.end(job, "error", failed[job.adapter]) for job in jobs]

    def renew_adapters(self) -> None:
        """Renew the adapters of waiting groups; media that other adapters encoded are encoded again."""
        for group in self.adapters.renew(self.scheduler):
            params = self.with_inputs.get(group)
            if params is not None and params.media is not None:
                params.media.forget()

    def end_lost(self) -> list[Output]:
        """End waiting requests whose adapter was removed, or is active on the model in another way."""
        ended = []
        for group in [*self.scheduler.preempted, *self.scheduler.waiting]:
            job = self.jobs[group]
            why_lost = self.adapters.why_lost(job.adapter, job.active)
            if why_lost is not None:
                ended.append(self.end(job, "error", RuntimeError(why_lost)))
        return ended

    def _changed_adapters(self) -> set[str]:
        """The adapters of running and preempted requests that were written to meanwhile."""
        if not self.adapters.present:
            return set()
        groups = self.scheduler.begun
        return self.adapters.contents.changed({name for group in groups for name in group.request.adapter})

    def end_changed_adapters(self) -> list[Output]:
        """End requests whose adapters were written to after they had begun: their latest tokens may mix old
        and new weights. Other requests go on.
        """
        changed = self._changed_adapters()
        ended = []
        for job in list(self.jobs.values()) if changed else ():
            begun = job.group is not None and job.group.status in (Status.RUNNING, Status.PREEMPTED)
            if begun and changed.intersection(job.adapter):
                ended.append(self.end(job, "error", _mixed(job, changed)))
        return ended

    def check_model(self) -> None:
        """Before a request ends or its code runs: check that the model is what it was, unless this step has
        done so.
        """
        if self.runner.eager.checks.unseen:
            self.model_check.require_untouched(len(self.scheduler.running))
            self.runner.check_captures()

    def start_over(self, error: BaseException) -> None:
        """Recover from a step that broke off: no request keeps what it computed.

        Requests are computed again. Those end here of which only some sequences have their token, or whose
        tokens may be of two models.
        """
        self.in_flight = None
        self.forget_media()
        self._sampling.clear()
        self.executor.forget()
        self.pools.checks.forget()
        spoiled = isinstance(error, WeightsChanged)
        for job in self.jobs.values():
            job.go_back()
        for kv_group in self.pools.kv_groups:
            kv_group.pool.recover()
            if kv_group.host is not None:
                kv_group.host.recover()
        self.scheduler.start_over(self.jobs)
        for group in self.with_inputs.keys() - self.jobs.keys():
            self.with_inputs.pop(group, None)
        for group, job in list(self.jobs.items()):
            if job.beams is not None and job.beams.state.done and job.output is None:
                job.conclude_beams()
            if job.output is not None:
                job.queue.end()
                self._release(group, job)
            elif job.all_ended:
                self.end(job)
            elif (
                group.status is Status.FINISHED or job.torn or (spoiled and group.status is Status.PREEMPTED)
            ):
                self.end(
                    job,
                    "error",
                    error if isinstance(error, Exception) else RuntimeError("a step broke off in the middle"),
                )

    def _encode_media(self, batch: ScheduledBatch) -> list[Media]:
        """Encode the media of prompts in this step: those that are not needed after it."""
        done = []
        fillers = self.runner.fillers
        for sequence, start, count, _ in batch.other_rows:
            params = self.with_inputs.get(sequence.group)
            media = None if params is None else params.media
            if media is None:
                continue
            if media.rope_deltas is None:
                self.runner.merger.recall(media)  # another request may have encoded the same media by now
            if media.due(start, count, sequence.begun):
                self.executor.encode_media(media, sequence.group)
            if media.rope_deltas:
                if media.one_by_one:
                    sequence.group.leave_table()
                if ROPE_DELTA.name not in fillers.by_name:
                    fillers.fill(ROPE_DELTA.name, rope_delta_filler(self.with_inputs))
            if media.spent(start, count):
                done.append(media)
        return done

    def forget_media(self) -> None:
        """Drop the embeddings of media: those of other weights are made again when needed."""
        for params in self.with_inputs.values():
            if params.media is not None:
                params.media.forget()

    def _inputs(self, batch: ScheduledBatch) -> dict[int, RowInputs]:
        """The inputs of rows other than token ids; those of one token each have none."""
        inputs: dict[int, RowInputs] = {}
        for i, (sequence, start, count, _) in enumerate(batch.other_rows, batch.decodes):
            params = self.with_inputs.get(sequence.group)
            if params is None:
                continue
            row = inputs_of(params.prompt_inputs, start, count, sequence.begun)
            scores = self.jobs[sequence.group].prompt_scores
            if scores is not None:
                row = row._replace(scored=None if row.past is not None else scores.wanted(start, count))
            media = params.media
            if isinstance(media, CrossMedia):
                row = row._replace(ids=media.ids_of(start, sequence.tokens[start : start + count]))
            elif media is not None:
                row = row._replace(positions=media.where(start, count))
            inputs[i] = row
        return inputs

    def end(self, job: Job, reason: FinishReason | None = None, error: BaseException | None = None) -> Output:
        """End a request, in whatever state it is."""
        group = job.group
        assert group is not None
        if error is not None:
            self._uncache(group)
        self.scheduler.abort(group)
        output = self.conclude(job, reason, error)
        self._release(group, job)  # not before there is an output: an interrupt may come in between
        for recorder in self.recorders:
            recorder.ended(group.request.number, output.finish_reason)
        return output

    def conclude(self, job: Job, reason: FinishReason | None, error: BaseException | None = None) -> Output:
        """Make the output of a request. Its tokenizer may raise, which fails this request alone, or change
        the model, which the next step checks.
        """
        self.runner.eager.checks.mark_dirty()
        output = job.close(reason, None if error is None else raised_by(error))
        if reaches_driver(output.error):
            self.interrupted.append(job)
        return output

    def _release(self, group: SequenceGroup, job: Job) -> None:
        """Release a request that has its output. Twice is once."""
        self.jobs.pop(group, None)
        self.with_inputs.pop(group, None)
        self._suspects.discard(group)
        self._sampling.histories.drop(group)
        group.sequences = []  # breaks the reference cycle: both are freed now, not by the collector
        if job.params.source is not None:
            job.params.source.made = None

    def _uncache(self, group: SequenceGroup) -> None:
        """Uncache the blocks of a failed request: their content may be wrong."""
        for sequence in group.sequences:
            for table in sequence.tables:
                for block in table.blocks:
                    table.pool.uncache(block)


def _mixed(job: Job, changed: set[str]) -> WeightsChanged:
    """The error of a request whose adapters have changed."""
    return WeightsChanged(
        f"the weights of adapter {min(changed.intersection(job.adapter))!r} have changed while its requests "
        "were running; their latest tokens may mix old and new weights, so they were ended. Call "
        "engine.pause() before a change and engine.resume() after it"
    )
