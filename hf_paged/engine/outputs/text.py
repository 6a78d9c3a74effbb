"""Text as it comes: never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
"""A decoder's mark for bytes that are no character, or not one yet."""


class Detokeniser:
    """The text of one sequence, token by token. The pieces it returns, joined, are the text of all tokens.

    A token's text depends on its neighbours, so each is decoded together with those before it: from `_begin`,
    where the text was last final, to `_read`, up to which it has been returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
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
            before = self._decode(self._tokens[self._begin : self._read])
            now = self._decode(self._tokens[self._begin :])
        except BaseException:  # the tokenizer is the user's: what it has not decoded is decoded again
            del self._tokens[known:]
            raise
        if not last and (now.endswith(BROKEN) or not now.startswith(before)):
            return ""
        self._begin = self._read
        self._read = len(self._tokens)
        return now[len(before) :]
