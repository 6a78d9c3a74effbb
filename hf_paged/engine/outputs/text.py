"""Text as it comes: never half a character, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Makes the text of tokens."""
BROKEN = "\ufffd"
"""A decoder's mark for bytes that are no character, or not one yet."""


class Detokeniser:
    """The text of one sequence, token by token. The pieces it returns, joined, are the text of all tokens.

    A token's text depends on its neighbours, so each is decoded together with those before it: from `_begin`,
    where the text was last final, to `_read`, up to which it has been returned.
    """

    def __init__(self, decode: Decode) -> None:
        """decode: the text of tokens, without those that are not to be shown."""
        self._decode = decode
        self._tokens: list[int] = []
        self._begin = self._read = 0

    def add(self, tokens: list[int], last: bool = False) -> str:
        """Text that these tokens add; the beginning of a character waits for the rest of it, at the longest
        to the `last`.
        """
        known = len(self._tokens)
        self._tokens += tokens
        try:
            before, now = self._texts()
        except BaseException:  # the tokenizer is the user's: what it has not decoded is decoded again
            del self._tokens[known:]
            raise
        if not last and (now.endswith(BROKEN) or not now.startswith(before)):
            return ""
        self._begin = self._read
        self._read = len(self._tokens)
        return now[len(before) :]

    @property
    def pending(self) -> str:
        """The next part of the text, as far as the tokens say it."""
        before, now = self._texts()
        return now[len(before) :].rstrip(BROKEN) if now.startswith(before) else ""

    def _texts(self) -> tuple[str, str]:
        """The text that the next one is decoded with, without it and with it."""
        return self._decode(self._tokens[self._begin : self._read]), self._decode(self._tokens[self._begin :])


class AnswerText:
    """The text of one answer: never half a character, and never beyond the first stop string.

    Text that may turn out to begin a stop string is held back.
    """

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        hidden: frozenset[int] = frozenset(),
        least: int = 0,
    ) -> None:
        """keep_stop: whether the stop string is part of the text. hidden: tokens at which the answer ends and
        which are not shown there. least: how many tokens come before one in which a stop string can end.
        """
        self._detokeniser = Detokeniser(decode)
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._keep_stop = keep_stop
        self._hidden = hidden
        self._held = ""
        self._least = least
        self._passed = 0
        """How much of what is held back belongs to the first tokens, in which no stop string ends."""
        self.length = 0
        """Characters that were handed out or are held back."""
        self.stopped = False
        """True once a stop string has been found; no text comes after it."""

    def add(self, tokens: list[int], last: bool) -> str:
        """Text that can be shown with these tokens; with the `last` ones all of it."""
        if self.stopped:
            return ""
        shown = tokens[:-1] if last and tokens and tokens[-1] in self._hidden else tokens
        first, others = shown[: self._least], shown[self._least :]
        self._least -= len(first)
        early = self._detokeniser.add(first) if first else ""
        if first and self._stops:
            self._passed = len(self._held + early + self._detokeniser.pending)
        new = early + (self._detokeniser.add(others, last) if others or last else "")
        self.length += len(new)
        if not self._stops:
            return new
        return self._cut(self._held + new, last)

    def _cut(self, text: str, last: bool) -> str:
        places = [(text.find(stop, max(0, self._passed + 1 - len(stop))), stop) for stop in self._stops]
        found = [(place, stop) for place, stop in places if place >= 0]
        if found:
            begin, stop = min(found)
            self.stopped = True
            self._held = ""
            return text[: begin + len(stop)] if self._keep_stop else text[:begin]
        keep = 0 if last else self._possible_beginning(text)
        shown = text[: len(text) - keep]
        self._held = text[len(text) - keep :]
        self._passed = max(0, self._passed - len(shown))
        return shown

    def _possible_beginning(self, text: str) -> int:
        """The length of the longest end of the text with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
