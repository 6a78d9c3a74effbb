"""The text of answers as they grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from ...engine.outputs.text import Detokeniser

Decode = Callable[[Sequence[int]], str]
"""Makes the text of tokens."""


def decode_of(tokenizer: Any, skip_special_tokens: bool = True) -> Decode:
    """A tokenizer's decode() with `skip_special_tokens` fixed, without the detour through Python where that
    changes nothing.
    """
    decoder = tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    tidies = getattr(tokenizer, "clean_up_tokenization_spaces", True)
    if backend is not None and not tidies and _decodes_as_stock(tokenizer):
        decoder = backend
    return partial(decoder.decode, skip_special_tokens=skip_special_tokens)


def _decodes_as_stock(tokenizer: Any) -> bool:
    """True if decode() is its backend's and nothing else."""
    kind = type(tokenizer)
    stock = PreTrainedTokenizerFast
    return kind.decode is stock.decode and getattr(kind, "_decode", None) is stock._decode


class AnswerText:
    """The text of one answer: never half a character, and never beyond the first stop string.

    Text that may turn out to begin a stop string is held back.
    """

    def __init__(
        self, decode: Decode, stops: Sequence[str], keep_stop: bool, hidden: frozenset[int], least: int = 0
    ) -> None:
        """hidden: tokens at which the answer ends and which are not shown there. least: how many tokens come
        before one in which a stop string can end.
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
        new = early + self._detokeniser.add(others, last)
        self.length += len(new)
        if not self._stops:
            return new
        if first:
            self._passed = len(self._held + early)
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
