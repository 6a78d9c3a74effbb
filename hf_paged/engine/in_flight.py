"""Steps in flight: the next one is planned and launched before the host has the tokens of the last one."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from ..kv.upload import Download, upload
from ..scheduling import (
    UNKNOWN,
    ScheduledBatch,
    Scheduler,
    SequenceGroup,
    Status,
    StepPlan,
    TokenSequence,
)
from .forward_batch import LastTokens
from .job import Job
from .sampling.answers import Answer
from .sampling.input_batch import InputBatch
from .sampling.penalties import PenaltyState
from .sampling.sampler import HostSampler, SamplingRows, no_token, note_of, numbers_of


class SamplingState:
    """What sampling keeps from step to step."""

    def __init__(self, jobs: Mapping[SequenceGroup, Job], last_tokens: LastTokens) -> None:
        self.jobs, self.last_tokens = jobs, last_tokens
        self.penalties = PenaltyState()
        self._input_batch: InputBatch | None = None

    def input_batch(self, sequences: tuple[TokenSequence, ...]) -> InputBatch:
        """The columns of these sequences: those of the step before, if they are the same."""
        if self._input_batch is None or self._input_batch.sequences != sequences:
            self._input_batch = InputBatch(sequences, self.jobs, self.penalties)
        return self._input_batch

    def clear(self) -> None:
        """Begin anew: a step broke off."""
        self._input_batch = None
        self.penalties.clear()


class InFlightStep:
    """A launched step: `sample` launches the choice of its tokens, `apply` gives them to their requests.

    Most tokens are chosen on the device: the next step finds them there, and a download brings them to the
    host. Requests that need the host for their tokens (beams, processors) take the way of `host`.
    """

    def __init__(
        self,
        plan: StepPlan,
        batch: ScheduledBatch,
        answer: Answer,
        failed: Mapping[SequenceGroup, Exception],
        sampling: SamplingState,
        begin: float,
    ) -> None:
        """batch: the rows of the plan without those of `failed` groups. answer: the logits behind the rows
        that are sampled from. begin: when the host began to launch it.
        """
        self.plan, self.batch, self.answer, self.failed = plan, batch, answer, failed
        self.begin = begin
        self._sampling = sampling
        self._input_batch: InputBatch | None = None
        self._download: Download | None = None
        self._tokens: list[int] = []
        self._logprobs: list[list[float]] = []
        self._ending: list[int] = []
        """Places whose sequence ends with its token."""
        self.host: HostSampler | None = None
        """The tokens of requests that need the host for them."""
        self.jobs: list[Job] = []
        """The jobs that may have ended with their tokens."""

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Those that get a token on the device."""
        return () if self._input_batch is None else self._input_batch.sequences

    def sample(self) -> None:
        """Launch the choice of the next tokens."""
        sampled, jobs = self.batch.sampled, self._sampling.jobs
        behind = sampled[self.batch.decodes :]
        rows = self._logits_rows() if behind else None
        if rows is not None and not all(jobs[sequence.group].plain for sequence in behind):
            self._sample_on_host(sampled, rows)
            places = [i for i, sequence in enumerate(sampled) if jobs[sequence.group].plain]
            sampled = tuple([sampled[i] for i in places])
            rows = [rows[i] for i in places]
        if sampled:
            self._sample_on_device(sampled, rows)

    def _logits_rows(self) -> list[int]:
        """Of each sequence that is sampled the row of its logits; a prompt's row may be that of several."""
        rows = list(range(self.batch.decodes))
        count = self.batch.decodes
        for samples in self.batch.samples[self.batch.decodes :]:
            rows += [count] * len(samples)
            count += bool(samples)
        return rows

    def _sample_on_device(self, sequences: tuple[TokenSequence, ...], rows: list[int] | None) -> None:
        columns = self._input_batch = self._sampling.input_batch(sequences)
        logits, known = self.answer
        if rows is not None and rows != list(range(len(logits))):
            index = upload(rows, logits.device)
            logits, known = logits[index], None if known is None else known[:, index]
        positions = [sequence.computed for sequence in sequences] if columns.uses_positions else []
        tokens, on_host = columns.choose(logits, positions, known)
        row_ids = self.batch.row_ids[: len(sequences)]
        if rows is not None:
            row_ids = array("i", [sequence.row for sequence in sequences])
        self._sampling.last_tokens.write(row_ids, tokens)
        wanted = [on_host]
        if columns.logprobs:
            index = upload(columns.logprobs, logits.device)
            most = max(columns.jobs[place].asked.favourites or 0 for place in columns.logprobs)
            wanted.append(numbers_of(logits[index].log_softmax(-1), tokens[index], most))
        self._download = Download(wanted)

    def _sample_on_host(self, sequences: Sequence[TokenSequence], rows: Sequence[int]) -> None:
        picks: dict[Job, list[int]] = {}
        for sequence, row in zip(sequences, rows, strict=True):
            job = self._sampling.jobs[sequence.group]
            if not job.plain:
                picks.setdefault(job, []).append(row)
        self.host = HostSampler([SamplingRows(*pick) for pick in picks.items()], self.answer.logits)

    # ---- behind the device

    def wait(self) -> bool:
        """Wait for the tokens: whether a request may end with its own, or has criteria that decide it."""
        columns = self._input_batch
        if self._download is None or columns is None:
            return False
        tokens, *logprobs = self._download.wait()
        self._tokens = tokens.tolist()
        self._logprobs = [row for each in logprobs for row in each.tolist()]
        self._ending = [*self.batch.last, *columns.ending(self._tokens)]
        behind = zip(columns.jobs[self.batch.decodes :], columns.sequences[self.batch.decodes :], strict=True)
        return (
            bool(self._ending)
            or columns.has_criteria
            or any(len(sequence.tokens) + 1 >= job.asked.max_length for job, sequence in behind)
        )

    def apply(self, scheduler: Scheduler) -> dict[Job, Exception]:
        """Give the tokens to the requests that still want them: those that failed, and why."""
        scheduler.confirm(self.plan, self.failed)
        columns = self._input_batch
        if columns is None:
            return {}
        one_by_one = {*range(self.batch.decodes, len(self._tokens)), *self._ending}
        if not scheduler.decode_batch.still_holds(self.batch):
            members = self.batch.sequences[: self.batch.decodes]
            one_by_one.update([i for i, sequence in enumerate(members) if sequence.row < 0])
        self._apply_together(scheduler, columns, one_by_one)
        return self._apply_one_by_one(scheduler, columns, sorted(one_by_one))

    def _apply_together(self, scheduler: Scheduler, columns: InputBatch, but: set[int]) -> None:
        """Rows of the decode batch that go on: all that is done is to write down each token."""
        sequences, streams, tokens = columns.sequences, columns.streams, self._tokens
        if but:
            here = [place for place in range(self.batch.decodes) if place not in but]
            sequences = tuple([sequences[place] for place in here])
            streams = [streams[place] for place in here]
            tokens = [tokens[place] for place in here]
        scheduler.extend(sequences, tokens)
        for stream, token in zip(streams, tokens, strict=True):
            stream.so_far.append(token)
        for job in columns.jobs:
            if job.news.readers:
                job.news.put()

    def _apply_one_by_one(
        self, scheduler: Scheduler, columns: InputBatch, places: Sequence[int]
    ) -> dict[Job, Exception]:
        by_job: dict[Job, list[int]] = {}
        for place in places:
            by_job.setdefault(columns.jobs[place], []).append(place)
        self.jobs = list(by_job)
        failed: dict[Job, Exception] = {}
        for job, own in by_job.items():
            if job.group is None or job.group.status is Status.FINISHED:
                continue
            # A sequence that ended in the step before has got a token too many.
            found = {columns.sequences[i]: i for i in own if columns.sequences[i] in job.group.sequences}
            tokens = {sequence: self._tokens[i] for sequence, i in found.items()}
            if UNKNOWN in tokens.values():
                failed[job] = no_token(job)
            elif tokens:
                try:
                    job.take(scheduler, tokens, self._notes(columns, job, found), self.answer.logits.device)
                except Exception as error:  # a criterion or a tokenizer of this request; its neighbours go on
                    failed[job] = error
        return failed

    def _notes(self, columns: InputBatch, job: Job, found: Mapping[TokenSequence, int]) -> Any:
        """The logprobs of a job's tokens, if it asked for any."""
        favourites = job.asked.favourites
        if favourites is None:
            return None
        rows = dict(zip(columns.logprobs, self._logprobs, strict=True))
        return {sequence: note_of(rows[i], self._tokens[i], favourites) for sequence, i in found.items()}
