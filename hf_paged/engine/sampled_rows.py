"""The rows whose tokens are chosen together on the device, and where these tokens go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..scheduling import UNKNOWN, SequenceGroup, TokenSequence
from .outputs.stream import Stream
from .requests.job import Job
from .sampling.columns import SamplingColumns
from .sampling.histories import Histories


class SampledRows(NamedTuple):
    """The sequences that get a token, their jobs and streams, and the columns that choose the tokens;
    rebuilt when these sequences change.

    A place is a sequence's index among them, in the order of the step's rows. top_logprobs: how many are
    reported beside a token at most. writers: of the places with logprobs. stop_places: those of requests with
    stop strings. requests: the jobs, each once.
    """

    columns: SamplingColumns
    sequences: tuple[TokenSequence, ...]
    jobs: list[Job]
    requests: list[Job]
    streams: list[Stream]
    ends: list[frozenset[int]]
    any_end: frozenset[int]
    stop_places: list[int]
    has_criteria: bool
    logprobs: list[int]
    top_logprobs: int
    writers: list[Callable[[list[float]], None]]

    def ending(self, tokens: list[int]) -> list[int]:
        """The places whose sequence ends with its token, or got no token."""
        return [
            place
            for place, (token, ends) in enumerate(zip(tokens, self.ends, strict=True))
            if token == UNKNOWN or token in ends
        ]

    def stopping(self, tokens: list[int]) -> list[int]:
        """The places in whose token a stop string ends."""
        streams = self.streams
        return [place for place in self.stop_places if streams[place].stops_with(tokens[place])]


def columns_of(
    sequences: Sequence[TokenSequence], jobs: Sequence[Job], histories: Histories
) -> SamplingColumns:
    """The columns that choose the tokens of sequences of these jobs."""

    def fail(place: int, error: Exception) -> None:
        jobs[place].trouble_with_scores = error

    return SamplingColumns(sequences, [job.params for job in jobs], histories, fail)


def sampled_rows(
    sequences: tuple[TokenSequence, ...], jobs: Mapping[SequenceGroup, Job], histories: Histories
) -> SampledRows:
    """The rows of these sequences."""
    own = [jobs[sequence.group] for sequence in sequences]
    params = [job.params for job in own]
    streams = [job.streams[sequence.index] for job, sequence in zip(own, sequences, strict=True)]
    ends = [each.ends for each in params]
    logprobs = [place for place, each in enumerate(params) if each.top_logprobs is not None]
    most = max([params[place].top_logprobs or 0 for place in logprobs], default=0)
    return SampledRows(
        columns=columns_of(sequences, own, histories),
        sequences=sequences,
        jobs=own,
        requests=list(dict.fromkeys(own)),
        streams=streams,
        ends=ends,
        any_end=frozenset([UNKNOWN]).union(*set(ends)),
        stop_places=[place for place, each in enumerate(params) if each.stop is not None],
        has_criteria=any(each.criteria for each in params),
        logprobs=logprobs,
        top_logprobs=most,
        writers=[streams[place].logprobs.writer(most) for place in logprobs],
    )
