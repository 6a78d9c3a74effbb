"""One answer as it grows, and what of it somebody has read."""

from __future__ import annotations

from typing import Any, NamedTuple

from .output import FinishReason, Increment, SequenceOutput, TokenLogprob
from .text import Detokeniser


class _Said(NamedTuple):
    """How far an answer has come, in one piece: another thread may look at any time."""

    tokens: int
    reason: FinishReason | None
    apart: bool
    """Whether the reason came after the last token, not with it."""


class Stream:
    """An answer. Increments are made when somebody reads them: an answer that is only fetched at its end costs none.

    `whole`: all tokens are one increment, as beams are known only at their end. The tokenizer is the user's: what it raises stays here
    as `trouble`, and ends the request.
    """

    def __init__(self, index: int, tokenizer: Any, whole: bool) -> None:
        self.index, self.whole = index, whole
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.score: float | None = None
        self.trouble: Exception | None = None
        """Why there is no text, or no more of it."""
        self._said = _Said(0, None, False)
        self._read = 0
        self._closed = False
        """Whether somebody has read the last increment."""
        self._tokenizer = tokenizer
        self._text = None if tokenizer is None else Detokeniser(tokenizer)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, if it did."""
        return self._said.reason

    def add(self, tokens: list[int], logprobs: list[TokenLogprob], finish_reason: FinishReason | None) -> None:
        """Grow, or end, or both."""
        self.tokens += tokens
        self.logprobs += logprobs
        self._said = _Said(len(self.tokens), finish_reason, not tokens)

    @property
    def unread(self) -> bool:
        """Whether there is an increment that nobody has read."""
        said = self._said
        return self._read < said.tokens or (said.reason is not None and not self._closed)

    def take(self) -> list[Increment]:
        """The increments that nobody has read yet: one for each token."""
        said, made = self._said, []
        while self._read < said.tokens:
            end = said.tokens if self.whole else self._read + 1
            last = end == said.tokens and not said.apart
            made.append(self._increment(self.tokens[self._read : end], said.reason if last else None))
            self._read = end
        if said.reason is not None and not self._closed:
            made.append(self._increment([], said.reason))
        return made

    def _increment(self, tokens: list[int], reason: FinishReason | None) -> Increment:
        self._closed = reason is not None
        text = None if self._text is None else self._read_out(self._text, tokens, last=reason is not None)
        return Increment(self.index, tokens, text, "error" if self._closed and self.trouble is not None else reason)

    def _read_out(self, text: Detokeniser, tokens: list[int], last: bool) -> str:
        if self.trouble is None:
            try:
                return text.add(tokens, last)
            except Exception as error:
                self.trouble = error
        return ""

    def output(self, with_logprobs: bool) -> SequenceOutput:
        """The answer, once it has ended. Without its text, if that is what the trouble is."""
        reason, text = self.finish_reason, None
        assert reason is not None
        if self._tokenizer is not None:
            try:
                text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
            except Exception as error:
                self.trouble, text = self.trouble or error, ""
        if self.trouble is not None:
            reason = "error"
        return SequenceOutput(list(self.tokens), text, reason, list(self.logprobs) if with_logprobs else None, self.score)
