"""Steps in flight: the next one is planned and launched before the host has the tokens of the last one."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..kv.static import download
from ..kv.upload import upload
from ..scheduling import (
    UNKNOWN,
    ScheduledBatch,
    Scheduler,
    SequenceGroup,
    Status,
    StepPlan,
    TokenSequence,
)
from .host_sampler import HostSampler, SamplingRows, no_token
from .outputs.output import TokenLogprob, TokenLogprobs
from .requests.job import Job
from .sampled_rows import SampledRows, sampled_rows
from .sampling.histories import Histories
from .sampling.scores import chosen_numbers_of
from .worker.forward_batch import Answer, LastTokens


class SamplingState:
    """The state of sampling from step to step."""

    def __init__(self, jobs: Mapping[SequenceGroup, Job], last_tokens: LastTokens) -> None:
        self.jobs = jobs
        self.last_tokens = last_tokens
        self.histories = Histories()
        self.rows = sampled_rows((), jobs, self.histories)
        """Those of the last step, which serve the next one if it samples the same sequences."""

    def clear(self) -> None:
        """Drop all, after a step that broke off."""
        self.rows = sampled_rows((), self.jobs, self.histories)
        self.histories.clear()


@dataclass(eq=False)
class InFlightStep:
    """A launched step: `sample` launches the choice of its tokens, `apply` gives them to their requests.

    Most tokens are chosen on the device: the next step finds them there, and a download brings them to the
    host. Requests that need the host for their tokens (beams, processors) take the way of `host`.
    """

    plan: StepPlan
    batch: ScheduledBatch
    """The rows of the plan without those of `failed` and `lost` groups."""
    answer: Answer
    """The logits behind the rows that are sampled from."""
    failed: Mapping[SequenceGroup, Exception]
    lost: Sequence[SequenceGroup]
    """Groups that begin again, as the step broke off after it may have advanced their states."""
    begin: float
    """When the host began to launch it, or had the tokens of the step before it: its own time begins then."""
    _sampling: SamplingState
    _rows: SampledRows | None = None
    _download: Callable[[], Sequence[torch.Tensor]] | None = None
    _scores: Callable[[], Sequence[torch.Tensor]] | None = None
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[list[float]] = field(default_factory=list)
    """The rows of the logprobs that were requested."""
    _ending: list[int] = field(default_factory=list)
    """Places whose sequence ends with its token."""
    sequences: tuple[TokenSequence, ...] = ()
    """The sequences that get a token on the device."""
    host: HostSampler | None = None
    """The tokens of requests that need the host for them."""
    jobs: list[Job] = field(default_factory=list)
    """The jobs that may have ended with their tokens."""

    def sample(self) -> None:
        """Launch the choice of the next tokens, and bring what was scored of prompts to the host."""
        batch = self.batch
        if self.answer.scores:
            self._scores = download(list(self.answer.scores.values()))
        answer = self.answer
        self.sequences = batch.sequences[: batch.decodes]
        row_ids = batch.row_ids[: batch.decodes]
        if len(batch.sequences) > batch.decodes:
            row_ids, answer = self._add_other_rows()
        if not self.sequences:
            return
        sampling = self._sampling
        if sampling.rows.sequences != self.sequences:
            sampling.rows = sampled_rows(self.sequences, sampling.jobs, sampling.histories)
        rows = self._rows = sampling.rows
        columns = rows.columns
        positions = [sequence.computed for sequence in self.sequences] if columns.uses_positions else []
        tokens, for_host = columns.choose(answer.logits, positions, answer.best)
        last = sampling.last_tokens
        last.tokens[last.index_of(row_ids)] = tokens.to(last.tokens.device)
        wanted = [for_host]
        if rows.logprobs:
            tensors = [answer.logits, tokens, columns.scores, columns.uncut]
            if len(rows.logprobs) < len(self.sequences):
                index = upload(rows.logprobs, tokens.device)
                tensors = [None if each is None else each[index] for each in tensors]
            logits, own, *others = tensors
            wanted.append(chosen_numbers_of(logits, own, rows.top_logprobs, *others))
        self._download = download(wanted)

    def _add_other_rows(self) -> tuple[array[int], Answer]:
        """Add the sequences of the other rows, to the host's sampler where they need it: the rows and the
        logits of all that are sampled on the device.
        """
        decodes = self.batch.decodes
        jobs = self._sampling.jobs
        logits = self.answer.logits
        rows = list(range(decodes))
        on_device = list(self.sequences)
        on_host: dict[Job, list[int]] = {}
        row = decodes
        for samples in self.batch.samples[decodes:]:
            for sequence in samples:
                if jobs[sequence.group].params.on_device:
                    on_device.append(sequence)
                    rows.append(row)
                else:
                    on_host.setdefault(jobs[sequence.group], []).append(row)
            row += bool(samples)
        if on_host:
            on_host_rows = [SamplingRows(*each) for each in on_host.items()]
            self.host = HostSampler(on_host_rows, logits, self._sampling.histories)
        self.sequences = tuple(on_device)
        row_ids = array("i", [sequence.row for sequence in on_device])
        if rows == list(range(len(logits))):
            return row_ids, self.answer
        index = upload(rows, logits.device)
        best = self.answer.best
        return row_ids, Answer(logits[index], None if best is None else best[:, index])

    # ---- behind the device

    def wait(self) -> bool:
        """Wait for the tokens: whether a request may end with its own, or has criteria that decide it."""
        rows = self._rows
        if self._download is None or rows is None:
            return False
        tokens, *logprobs = self._download()
        self._tokens = tokens.tolist()
        for numbers in logprobs:
            self._logprobs = numbers.tolist()
        self._ending = list(self.batch.last)
        if not rows.any_end.isdisjoint(self._tokens):
            self._ending += rows.ending(self._tokens)
        if rows.stop_places:
            self._ending += rows.stopping(self._tokens)
        for place in range(self.batch.decodes, len(self._tokens)):
            if len(self.sequences[place].tokens) + 1 >= rows.jobs[place].params.max_length:
                self._ending.append(place)
        return bool(self._ending) or rows.has_criteria

    def apply(self, scheduler: Scheduler) -> dict[Job, Exception]:
        """Append the tokens to requests that have not ended: the failed ones, and why."""
        rows = self._rows
        sequences = self.sequences
        streams = [] if rows is None else rows.streams
        tokens = self._tokens
        here: Sequence[int] = range(len(tokens))
        one_by_one = {*range(self.batch.decodes, len(tokens)), *self._ending}
        one_by_one.update([place for place, sequence in enumerate(sequences) if sequence.row < 0])
        if one_by_one:
            here = [place for place in range(self.batch.decodes) if place not in one_by_one]
            sequences = tuple([sequences[place] for place in here])
            streams = [streams[place] for place in here]
            tokens = [tokens[place] for place in here]
        # All that is done for a sequence that continues: its token is appended.
        without = {*self.failed, *self.lost} if self.lost else self.failed
        scheduler.confirm(self.plan, without, sequences, tokens)
        if self._logprobs and rows is not None:
            writers = zip(rows.logprobs, rows.writers, self._logprobs, strict=True)
            for place, write, row in writers:
                if place not in one_by_one:
                    write(row)
        for stream, token in zip(streams, tokens, strict=True):
            stream.so_far.append(token)
        if self.answer.scores:
            self.note_prompts(scheduler)
        if rows is None:
            return {}
        for job in rows.requests:
            if job.queue.readers:
                job.queue.put()
        return self._apply_one_by_one(scheduler, rows, sorted(one_by_one)) if one_by_one else {}

    def note_prompts(self, scheduler: Scheduler) -> None:
        """Give requests what was scored of their prompts, and cache it for others that begin alike."""
        if self._scores is None:
            return
        found = dict(zip(self.answer.scores, self._scores(), strict=True))
        for row_id, (sequence, start, count, _) in zip(self.batch.row_ids, self.batch.rows, strict=True):
            job = self._sampling.jobs.get(sequence.group) if row_id in found else None
            if job is not None and job.prompt_scores is not None:
                job.prompt_scores.note(start + 1, found[row_id].tolist())
                job.prompt_scores.publish(scheduler.prefixes.scores, sequence.group.prompt, start, count)

    def _apply_one_by_one(
        self, scheduler: Scheduler, rows: SampledRows, places: Sequence[int]
    ) -> dict[Job, Exception]:
        by_job: dict[Job, list[int]] = {}
        for place in places:
            by_job.setdefault(rows.jobs[place], []).append(place)
        self.jobs = list(by_job)
        failed: dict[Job, Exception] = {}
        for job, own in by_job.items():
            if job.group is None or job.group.status is Status.FINISHED:
                continue
            # A sequence that ended in the step before has got a token too many.
            found = {rows.sequences[i]: i for i in own if rows.sequences[i] in job.group.sequences}
            tokens = {sequence: self._tokens[i] for sequence, i in found.items()}
            if UNKNOWN in tokens.values():
                failed[job] = no_token(job)
            elif tokens:
                try:
                    notes = {sequence: self._note_at(rows, i) for sequence, i in found.items()}
                    job.append(scheduler, tokens, notes, self.answer.logits.device)
                except (
                    Exception
                ) as error:  # a criterion or a tokenizer of this request failed; others continue
                    failed[job] = error
        return failed

    def _note_at(self, rows: SampledRows, place: int) -> TokenLogprob | None:
        """The logprob of a token, if its job requested one."""
        top_logprobs = rows.jobs[place].params.top_logprobs
        if top_logprobs is None:
            return None
        notes = TokenLogprobs(top_logprobs)
        notes.writer(rows.top_logprobs)(self._logprobs[bisect_left(rows.logprobs, place)])
        return notes[0]
