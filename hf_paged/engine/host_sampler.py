"""Tokens of requests that need the host: custom processors, and beam search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from ..kv.static import download
from ..kv.upload import upload
from ..scheduling import UNKNOWN, Scheduler, SequenceGroup, TokenSequence
from .outputs.output import TokenLogprob, TokenLogprobs
from .requests.callables import require_known
from .requests.job import Job
from .sampled_rows import columns_of
from .sampling.beams import BeamCandidates, BeamSearch, BeamStep, Continuations, step
from .sampling.candidates import BeamScorer, top_continuations
from .sampling.grammar import masked, next_token_bitmasks, unfollowed
from .sampling.histories import Histories
from .sampling.parameters import TEMPERATURE
from .sampling.random_numbers import row_states
from .sampling.scores import chosen_numbers_of
from .sampling.warp import draw


class SamplingRows(NamedTuple):
    """A job, and the rows of the step's logits for its running sequences, in their order."""

    job: Job
    rows: list[int]


class NoToken(RuntimeError):
    """The model's logits, or a processor's result, leave no token to choose."""


def no_token(job: Job) -> Exception:
    """The error of a job for whose logits the device found no token."""
    if job.trouble_with_scores is not None:
        return job.trouble_with_scores
    ruled = (
        ", or its processors made NaN scores or leave no token to draw"
        if job.params.has_rules
        else ", and leave no token"
    )
    temperature = (job.params.warp or {}).get(TEMPERATURE.name)
    if job.params.sampled and temperature is not None:
        return NoToken(f"the model's logits over temperature={temperature} are NaN, inf or all -inf{ruled}")
    return NoToken(f"the model's logits are NaN or all -inf{ruled}")


class HostSampler:
    """The next tokens of the requests that need the host for them: grammars, processors of their own, and
    beams. logits [rows, vocabulary] in fp32.

    The continuations of beams without processors are compared together on the device: that is launched at
    once. The tokens of requests with grammars are chosen together, under masks that are filled while the
    device computes. Processors and criteria run in `apply`, only for their own rows; what they raise ends
    their request.
    """

    def __init__(self, requests: Sequence[SamplingRows], logits: torch.Tensor, histories: Histories) -> None:
        self.jobs = [request.job for request in requests]
        self._requests = requests
        self._logits = logits
        self._failed: dict[Job, Exception] = {}
        self._scorers = _scorers(requests, logits)
        compared = {request.job for others, _ in self._scorers for request in others}
        self._guided = [request for request in requests if request.job.params.grammar is not None]
        self._own = [
            request
            for request in requests
            if request.job not in compared and request.job.params.grammar is None
        ]
        self._histories = histories
        self._guided_scores: dict[Job, torch.Tensor] = {}
        """Scores that tokens of requests with grammars are chosen from, [rows, vocabulary]."""
        tensors = []
        if self._own:
            rows = [row for request in self._own for row in request.rows]
            tensors.append(logits[upload(rows, logits.device)].amax(1).isnan())
        self._download = download(
            [*tensors, *[tensor for _, scorer in self._scorers for tensor in scorer.tensors]]
        )

    def wait(self) -> bool:
        """True if code of requests may decide about the tokens: here it may."""
        return True

    def apply(self, scheduler: Scheduler) -> dict[Job, Exception]:
        """Wait for what was launched, and give every job its tokens: the jobs that failed, and why."""
        guided = self._guide()
        arrived = iter(self._download())
        self._take_guided(scheduler, guided)
        broken = _dealt(self._own, next(arrived).tolist() if self._own else [])
        self._reject(job for job, found in broken.items() if any(found) and not job.params.mends)
        self._each(
            [request for request in self._own if request.job.beams is None],
            lambda request: self._take(scheduler, request, *self._chosen(request)),
        )
        self._search(scheduler, arrived)
        return self._failed

    def _reject(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._failed[job] = no_token(job)

    def _each(self, requests: Iterable[SamplingRows], act: Callable[[SamplingRows], None]) -> None:
        """Call a function for every job that has not failed or ended."""
        for request in requests:
            if request.job not in self._failed and request.job.output is None:
                try:
                    act(request)
                except (
                    Exception
                ) as error:  # a processor, a criterion or a tokenizer of this request failed; others continue
                    self._failed[request.job] = error

    # ---- grammars

    def _guide(self) -> Callable[[], Sequence[torch.Tensor]] | None:
        """Launch the choice of the tokens that follow grammars."""
        logits = self._logits
        followed: list[SamplingRows] = []
        matchers: list[Any] = []
        for request in [each for each in self._guided if each.job.output is None]:
            try:
                matchers += _matchers(request.job)
                followed.append(request)
            except Exception as error:
                self._failed[request.job] = error
        self._guided = followed
        if not followed:
            return None
        known = [request.job.params.grammar.vocabulary for request in followed if request.job.params.grammar]
        bits = next_token_bitmasks(matchers, max(logits.shape[1], *known), logits.device)
        rows = [row for request in followed for row in request.rows]
        sequences = [sequence for request in followed for sequence in _group(request.job).sequences]
        jobs = [request.job for request in followed for _ in request.rows]
        columns = columns_of(sequences, jobs, self._histories)
        scores = masked(logits[upload(rows, logits.device)], bits)
        positions = [len(sequence.tokens) for sequence in sequences]
        for job, own in _dealt(followed, matchers).items():
            trouble = next((each for each in own if each.is_error()), None)
            if trouble is not None:
                job.trouble_with_scores = unfollowed(trouble)
        tokens = columns.choose(scores, positions)
        if any(request.job.params.top_logprobs is not None for request in followed):
            chosen_from = _dealt(followed, list(columns.scores if columns.scores is not None else scores))
            self._guided_scores = {job: torch.stack(each) for job, each in chosen_from.items()}
        return download([tokens[1]])

    def _take_guided(self, scheduler: Scheduler, chosen: Callable[[], Sequence[torch.Tensor]] | None) -> None:
        if chosen is None:
            return
        tokens = _dealt(self._guided, chosen()[0].tolist())
        self._reject(job for job, own in tokens.items() if UNKNOWN in own or job.trouble_with_scores)
        self._each(
            self._guided,
            lambda request: self._take(
                scheduler, request, tokens[request.job], self._guided_scores.get(request.job)
            ),
        )

    # ---- samples

    def _chosen(self, request: SamplingRows) -> tuple[list[int], torch.Tensor]:
        """The tokens of a job with custom processors, and the scores that they were chosen from."""
        job = request.job
        own = self._logits[request.rows][:, : job.params.known.scores]
        scores = _sound(job.processed(own, own.device), job)
        tokens: list[int] = (_drawn(request, scores) if job.params.sampled else scores.argmax(-1)).tolist()
        return require_known(tokens, own.shape[1], scores), scores

    def _take(
        self, scheduler: Scheduler, request: SamplingRows, tokens: list[int], scores: torch.Tensor | None
    ) -> None:
        """Give a job its tokens; logprobs are computed only where they were requested."""
        sequences = _group(request.job).sequences
        notes: dict[TokenSequence, TokenLogprob] = {}
        if request.job.params.top_logprobs is not None:
            logits = self._logits[request.rows]
            if scores is not None:
                logits = logits[:, : scores.shape[1]]
            found = _notes(logits, tokens, request.job.params.top_logprobs, scores)
            notes = dict(zip(sequences, found, strict=True))
        request.job.append(scheduler, dict(zip(sequences, tokens, strict=True)), notes, self._logits.device)

    # ---- beams

    def _search(self, scheduler: Scheduler, arrived: Iterator[torch.Tensor]) -> None:
        """Advance the beam searches, all of one shape together."""
        compared: dict[Job, Continuations | None] = {}
        for requests, scorer in self._scorers:
            found = scorer.found([next(arrived) for _ in scorer.tensors])
            compared |= zip([request.job for request in requests], found, strict=True)
        self._reject(job for job, found in compared.items() if found is None)
        candidates: dict[tuple[int, int], dict[Job, BeamCandidates]] = {}

        def judge(request: SamplingRows) -> None:
            job = request.job
            assert job.beams is not None
            found = compared.get(job) or self._continuations(request, job.beams)
            reasons = job.judged(found.beams, found.tokens, self._logits.device)
            candidates.setdefault(job.beams.shape, {})[job] = job.beams.candidates(found, reasons)

        searching = [request for request in self._requests if request.job.beams is not None]
        self._each(searching, judge)
        steps: dict[Job, BeamStep] = {}
        for alike in candidates.values():
            steps |= zip(alike, step(list(alike.values())), strict=True)
        self._each(searching, lambda request: request.job.append_beams(scheduler, steps[request.job]))

    def _continuations(self, request: SamplingRows, search: BeamSearch) -> Continuations:
        """The best continuations, or drawn ones, of a search with custom processors."""
        own = self._logits[request.rows][:, : request.job.params.known.scores].log_softmax(-1)
        scores = _sound(request.job.processed(own, own.device), request.job)
        values, places = top_continuations(search, scores)
        beams = (places // scores.shape[1]).tolist()
        tokens = require_known((places % scores.shape[1]).tolist(), own.shape[1], scores)
        top_logprobs = request.job.params.top_logprobs
        notes = (
            None
            if top_logprobs is None
            else _notes(self._logits[[request.rows[beam] for beam in beams]], tokens, top_logprobs, None)
        )
        return Continuations(values.tolist(), beams, tokens, notes)


def _group(job: Job) -> SequenceGroup:
    assert job.group is not None
    return job.group


def _matchers(job: Job) -> list[Any]:
    """Where the running sequences of a job are in its grammar."""
    assert job.params.grammar is not None
    job.params.grammar.require_known()
    begin = len(job.params.prompt)
    return [
        job.grammar_states[sequence.index].matcher_after(sequence.tokens[begin:])
        for sequence in _group(job).sequences
    ]


def _scorers(
    requests: Sequence[SamplingRows], logits: torch.Tensor
) -> list[tuple[list[SamplingRows], BeamScorer]]:
    """The searches that can be scored together, by their shapes."""
    alike: dict[tuple[int, int], list[SamplingRows]] = {}
    for request in requests:
        search = request.job.beams
        params = request.job.params
        if search is None or params.processors or params.sampled:
            continue
        if search.keep <= search.count * logits.shape[1]:  # else it fails by itself
            alike.setdefault(search.shape, []).append(request)
    return [
        (
            those,
            BeamScorer(
                [request.job.beams for request in those if request.job.beams],
                [row for request in those for row in request.rows],
                logits,
            ),
        )
        for those in alike.values()
    ]


def _dealt(requests: Sequence[SamplingRows], found: list[Any]) -> dict[Job, list[Any]]:
    """The candidates of each job."""
    each = iter(found)
    return {request.job: list(islice(each, len(request.rows))) for request in requests}


def _drawn(request: SamplingRows, scores: torch.Tensor) -> torch.Tensor:
    """Tokens [rows] drawn from a job's processed scores [rows, vocabulary]."""
    assert request.job.group is not None
    sequences = request.job.group.sequences
    seeds = [request.job.params.seed] * len(sequences)
    states = row_states(seeds, [sequence.index for sequence in sequences])
    return draw(scores, states, [len(sequence.tokens) for sequence in sequences])


def _sound(scores: torch.Tensor, job: Job) -> torch.Tensor:
    """Scores [rows, vocabulary], checked to leave a token in every row, or for beams in any row."""
    if bool(scores.isnan().any()):
        raise NoToken("a logits processor returned NaN scores")
    best = scores.amax(-1) if job.beams is None else scores.amax()
    if not bool((best > -torch.inf).all()):
        raise NoToken("no token is left after the logits processors: all scores of a row are -inf")
    if job.params.sampled and not bool(best.isfinite().all()):
        raise NoToken("no token can be drawn after the logits processors: a score is inf")
    return scores


def _notes(
    logits: torch.Tensor, tokens: Sequence[int], top_logprobs: int, scores: torch.Tensor | None
) -> list[TokenLogprob]:
    """The logprob of each token of logits [tokens, vocabulary], and its top logprobs. scores: what they were
    chosen from.
    """
    notes = TokenLogprobs(top_logprobs)
    write = notes.writer(top_logprobs)
    for row in chosen_numbers_of(logits, upload(tokens, logits.device), top_logprobs, scores).tolist():
        write(row)
    beams = scores is None
    return [note._replace(kept=None, processed=None if beams else note.processed) for note in notes]
