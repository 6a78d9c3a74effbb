"""One answer as it grows, and how much of it has been read."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from .output import FinishReason, Increment, NewTokens, SequenceOutput, TokenLogprob, TokenLogprobs
from .stops import Stop
from .text import AnswerText, Decode


class _StreamEnd(NamedTuple):
    """How an answer ended, in one object: another thread may read it at any time."""

    tokens: list[int]
    """All of them."""
    reason: FinishReason
    apart: bool
    """True if the reason came after the last token, not with it."""


class Stream:
    """An answer. Increments are made when they are read: an answer that is only fetched at its end makes
    none.

    `whole`: all tokens are one increment, as beams are known only at their end. `stop`: strings that end it,
    and are no part of its text. The tokenizer is the user's: an exception that it raises is kept as `trouble`
    and ends the request.
    """

    def __init__(
        self, index: int, tokenizer: Any, whole: bool, top_logprobs: int = 0, stop: Stop | None = None
    ) -> None:
        self.index = index
        self.whole = whole
        self.so_far: list[int] = []
        """Its tokens until it ends; the last one comes with its end."""
        self.logprobs = TokenLogprobs(top_logprobs)
        self.score: float | None = None
        self.routing: torch.Tensor | None = None
        """The experts of its tokens, once it has ended, if they are returned."""
        self.trouble: BaseException | None = None
        """Why there is no text, or no more of it."""
        self._end: _StreamEnd | None = None
        self._read = 0
        self._closed = False
        """True once the last increment has been read."""
        self._decode = None if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=True)
        self._stop = stop
        self._at = 0, 0
        """How many tokens were read for stop strings, and the state of their automaton."""
        self._text = None if self._decode is None else self._new_text(self._decode)

    def _new_text(self, decode: Decode) -> AnswerText:
        """The text of an answer that begins."""
        if self._stop is None:
            return AnswerText(decode)
        return AnswerText(decode, self._stop.strings, least=self._stop.least)

    @property
    def tokens(self) -> list[int]:
        """Its tokens."""
        return self.so_far if self._end is None else self._end.tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, if it did."""
        return None if self._end is None else self._end.reason

    def add(
        self, tokens: list[int], logprobs: list[TokenLogprob], finish_reason: FinishReason | None
    ) -> None:
        """Grow, or end, or both."""
        for note in logprobs:
            self.logprobs.append(note)
        if finish_reason is None:
            self.so_far += tokens
        else:
            self._end = _StreamEnd(self.so_far + tokens, finish_reason, not tokens)

    def stops_with(self, token: int) -> bool:
        """True if a stop string ends within this token, if it is the next one."""
        if self._stop is None:
            return False
        automaton = self._stop.automaton
        read, state = self._at
        for each in self.so_far[read:]:
            found = automaton.move(state, each)
            state = found if found >= 0 else ~found
            read += 1
        self._at = read, state
        ahead = automaton.moves[state].get(token)  # of all that is done for a token, as short as can be
        if ahead is None:
            ahead = automaton.move(state, token)
        return ahead < 0 and read >= self._stop.least

    @property
    def unread(self) -> bool:
        """True if there is an unread increment."""
        end = self._end
        return self._read < len(self.so_far if end is None else end.tokens) or (
            end is not None and not self._closed
        )

    def take(self) -> list[Increment]:
        """The unread increments: one for each token."""
        end = self._end
        made = []
        tokens = self.so_far if end is None else end.tokens
        there = len(tokens)
        while self._read < there:
            until = there if self.whole else self._read + 1
            last = end is not None and until == there and not end.apart
            reason = end.reason if last and end is not None else None
            notes = self.logprobs[self._read : until]
            made.append(self._increment(tokens[self._read : until], reason, notes))
            self._read = until
        if end is not None and not self._closed:
            made.append(self._increment([], end.reason))
        return made

    def take_tokens(self) -> NewTokens | None:
        """The unread tokens without their text; None if nothing is new. An end that came apart is the next
        ones'.
        """
        end = self._end
        read = self._read
        tokens = self.so_far if end is None else end.tokens
        there = len(tokens)
        if there == read and (end is None or self._closed):
            return None
        self._read = there
        reason = None if end is None or (end.apart and there > read) else end.reason
        self._closed = reason is not None
        notes = self.logprobs[read:there] if self.logprobs else None
        return NewTokens(self.index, tokens[read:there], reason, notes)

    def _increment(
        self, tokens: list[int], reason: FinishReason | None, notes: list[TokenLogprob] | None = None
    ) -> Increment:
        self._closed = reason is not None
        text = "" if self._text is None else self._read_out(self._text, tokens, last=reason is not None)
        shown = "error" if self._closed and self.trouble is not None else reason
        return Increment(self.index, tokens, text, shown, notes or None)

    def _read_out(self, text: AnswerText, tokens: list[int], last: bool) -> str:
        if self.trouble is None:
            try:
                return text.add(tokens, last)
            except BaseException as error:
                self.trouble = error
        return ""

    def output(self, with_logprobs: bool) -> SequenceOutput:
        """The answer, once it has ended. Without its text, if that is what the trouble is."""
        assert self._end is not None
        tokens, reason, _ = self._end
        text = None
        decode = self._decode
        if decode is not None:
            try:
                text = decode(tokens) if self._stop is None else self._new_text(decode).add(tokens, last=True)
            except BaseException as error:
                self.trouble = self.trouble or error
                text = ""
        if self.trouble is not None:
            reason = "error"
        logprobs = self.logprobs.copy() if with_logprobs else None
        return SequenceOutput(list(tokens), text, reason, logprobs, self.score, self.routing)
