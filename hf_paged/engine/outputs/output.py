"""Outputs of requests."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import nan
from typing import Any, Literal, NamedTuple, overload

import torch

from ...model.caller import caller_level
from .picture import Answer, Usage, answers_picture, shortened

FinishReason = Literal["stop", "length", "abort", "refused", "error"]
TROUBLE: tuple[FinishReason, ...] = ("refused", "error", "abort")
SHOWN = 8
"""Items of a list that a repr shows."""
FIRST = 4
"""The numbers of a token before those of the top tokens beside it."""


class TokenLogprob(NamedTuple):
    """The log-probability of a token, before any processor.

    top_logprobs: the top tokens in its place and their log-probabilities, as many as were requested.
    processed: the logprob after penalties, temperature and cuts, which it was chosen from; None of a beam.
    kept: the share of the probability, after penalties and temperature, that top_k, top_p and min_p left to
        choose from: without them the logprob would be `processed + log(kept)`. 1 without cuts; None of a
        beam, or where processors of the request's own or a grammar choose.
    """

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    processed: float | None = None
    kept: float | None = None

    @property
    def favourites(self) -> tuple[tuple[int, float], ...]:
        """The older name of `top_logprobs`."""
        warnings.warn("favourites is now top_logprobs", DeprecationWarning, stacklevel=2)
        return self.top_logprobs


class TokenLogprobs(Sequence[TokenLogprob]):
    """One TokenLogprob for each token of an answer, made when it is read.

    A rollout has too many tokens for an object each: Python's garbage collector would walk through them again
    and again.

    A row of numbers for each token: the token, its logprob, its logprob as it was chosen and the share that
    cuts left (NaN for None); then the logprobs of the top tokens, the best first, and their ids.
    """

    def __init__(self, top_logprobs: int = 0, notes: Iterable[TokenLogprob] = ()) -> None:
        self._top_logprobs = top_logprobs
        self._width = FIRST + 2 * top_logprobs
        self._numbers = array("d")
        for note in notes:
            self.append(note)

    def __len__(self) -> int:
        return len(self._numbers) // self._width

    @overload
    def __getitem__(self, place: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenLogprob]: ...
    def __getitem__(self, place: int | slice) -> TokenLogprob | list[TokenLogprob]:
        places = range(len(self))[place]
        return self._note(places) if isinstance(places, int) else list(map(self._note, places))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # they grow

    def __repr__(self) -> str:
        return _cut(self)

    @property
    def raw(self) -> list[float]:
        """The logprob of each token, before any processor."""
        return self._numbers[1 :: self._width].tolist()

    @property
    def processed(self) -> list[float | None]:
        """The logprob of each token as it was chosen; None of a beam's."""
        return [None if each != each else each for each in self._numbers[2 :: self._width]]

    def append(self, note: TokenLogprob) -> None:
        """Add what is known of the next token."""
        numbers = [nan if each is None else each for each in (note.processed, note.kept)]
        ids, logprobs = zip(*note.top_logprobs, strict=True) if note.top_logprobs else ((), ())
        self._numbers.extend(chain((note.token_id, note.logprob), numbers, logprobs, ids))

    def writer(self, top_logprobs: int) -> Callable[[list[float]], None]:
        """The writer of the next token's row, which may be beside more top tokens than are wanted here."""
        write = self._numbers.fromlist
        own, ids = FIRST + self._top_logprobs, FIRST + top_logprobs
        if own == ids:
            return write
        return lambda row: write(row[:own] + row[ids : ids + self._top_logprobs])

    def crop(self, tokens: int) -> None:
        """Keep those of the first tokens."""
        del self._numbers[tokens * self._width :]

    def copy(self) -> TokenLogprobs:
        """The same, which does not grow with these."""
        copied = TokenLogprobs(self._top_logprobs)
        copied._numbers = self._numbers[:]
        return copied

    def _note(self, place: int) -> TokenLogprob:
        begin = place * self._width
        token, logprob, processed, kept, *others = self._numbers[begin : begin + self._width]
        half = self._top_logprobs
        pairs = tuple(zip(map(int, others[half:]), others[:half], strict=True))
        told = (None if each != each else each for each in (processed, kept))
        return TokenLogprob(int(token), logprob, pairs, *told)


@dataclass(frozen=True)
class SequenceOutput:
    """One answer: new tokens only.

    finish_reason: "stop" (an end-of-sequence token, a stop string or a stopping criterion), "length"
        (max_new_tokens, max_length or max_time), "abort", "refused" or "error".
    score: of a beam, as generate() scores it.
    logprobs: if they were requested, one for each token.
    routing: if it was requested, the experts int16 [prompt + answer - 1, layers with experts, k] of each
        token but the last one, which no forward has computed; None of an answer that was broken off.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    logprobs: TokenLogprobs | None = None
    score: float | None = None
    routing: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' logprobs, if they were requested."""
        return None if self.logprobs is None else sum(self.logprobs.raw)

    def __repr__(self) -> str:
        more = "" if self.score is None else f", score={self.score}"
        more += "" if self.logprobs is None else f", logprobs={self.logprobs!r}"
        return (
            f"SequenceOutput(text={shortened(self.text)!r}, finish_reason={self.finish_reason!r}, "
            f"token_ids={_cut(self.token_ids)}{more})"
        )


@dataclass
class Timing:
    """When things happened, in seconds of `time.monotonic`; None for what has not."""

    submitted: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class Output:
    """The answer to one request.

    cached_tokens: how many tokens of the prompt were cached. preemptions: how often it was preempted.
    error: what went wrong, if something did; it may be a BaseException that the request's own code raised
    (asyncio.CancelledError, SystemExit). prompt_logprobs: if they were requested, and the prompt was
    computed: one for each of its tokens, None for the first one, which follows nothing. block_size: tokens of
    a block of the engine; 0 if it was refused.
    """

    prompt_token_ids: list[int]
    sequences: list[SequenceOutput]
    cached_tokens: int = 0
    preemptions: int = 0
    timing: Timing = field(default_factory=lambda: Timing(0.0))
    error: BaseException | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    block_size: int = 0

    @property
    def text(self) -> str | None:
        """The text of the first answer."""
        return self.sequences[0].text if self.sequences else None

    @property
    def finish_reason(self) -> FinishReason:
        """Why the request ended: its trouble if it had any, else why its first answer did."""
        reasons = [sequence.finish_reason for sequence in self.sequences]
        for trouble in TROUBLE:
            if trouble in reasons:
                return trouble
        return reasons[0]

    def __repr__(self) -> str:
        more = "" if self.error is None else f", error={self.error!r}"
        more += f", preemptions={self.preemptions}" if self.preemptions else ""
        return (
            f"Output(sequences={self.sequences!r}, prompt_token_ids={_cut(self.prompt_token_ids)}, "
            f"cached_tokens={self.cached_tokens}{more})"
        )

    def _repr_html_(self) -> str:
        new = sum(len(each.token_ids) for each in self.sequences)
        prompt = f"{len(self.prompt_token_ids):,} ({self.cached_tokens:,} cached)"
        times = [
            f"{name} after {moment - self.timing.submitted:.2f} s"
            for name, moment in (("first token", self.timing.first_token), ("all", self.timing.finished))
            if moment is not None
        ]
        lines = [
            f"prompt tokens: {prompt}, new tokens: {new:,}",
            ", ".join(times),
            "" if self.error is None else repr(self.error),
        ]
        usage = Usage(len(self.prompt_token_ids), self.cached_tokens, self.block_size)
        answers = [Answer(each.text, len(each.token_ids), each.finish_reason) for each in self.sequences]
        return answers_picture(f"Output: {self.finish_reason}", list(filter(None, lines)), usage, answers)


@dataclass(frozen=True)
class Increment:
    """A piece of an answer as it comes: new tokens of sequence `index`, their text, and why it ended if it
    did.

    text: "" without a tokenizer. logprobs: one for each token, if they were asked for.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob] | None = None


class NewTokens(NamedTuple):
    """All unread tokens of an answer, and why it ended with the last one if it did. logprobs: one for each,
    if they were asked for.
    """

    answer: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob] | None


def _cut(items: Sequence[Any]) -> str:
    """The first items and the last one, and how many there are."""
    if len(items) <= SHOWN:
        return repr(list(items))
    return f"[{', '.join(map(repr, items[: SHOWN - 2]))}, ..., {items[-1]!r}; {len(items):,} in all]"


def with_errors_noticed(outputs: list[Output], strict: bool) -> list[Output]:
    """The outputs of a list of prompts, with one warning about those that have an error; `strict` raises the
    first error.
    """
    failed = [(place, output) for place, output in enumerate(outputs) if output.error is not None]
    if failed:
        place, output = failed[0]
        error = output.error
        assert error is not None
        if strict:
            raise error
        first = f"prompts[{place}] ended as {output.finish_reason!r}, {type(error).__name__}: {error}"
        warnings.warn(
            f"{len(failed)} of {len(outputs)} requests have no complete answer: {first}. "
            "Check finish_reason and error of the outputs, or pass strict=True to raise",
            stacklevel=caller_level(),
        )
    return outputs
