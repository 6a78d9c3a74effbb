"""Stop strings: transformers' criterion at a cost that grows with the logarithm of their number."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from transformers import StoppingCriteria, StopStringCriteria

KEPT = 8
"""So many lists of stop strings are kept for later requests, those used last."""
Text = str | bytes


class StopStrings(StoppingCriteria):
    """True for rows in whose last tokens a stop string ends within the very last one.

    StopStringCriteria computes that from a matrix of vocabulary times strings. Here the strings are sorted by
    their ends, without those that end with another one. Of the others at most one ends at a place of the
    text: a binary search finds it.
    """

    def __init__(self, strings: Sequence[Text], texts: Mapping[int, Text]) -> None:
        self._texts = texts
        self._always = any(len(string) == 0 for string in strings)
        self._longest = max(map(len, strings))
        """The most tokens that are compared, as in transformers, and the most characters of a string."""
        self._ends: list[Text] = []
        for end in sorted([string[::-1] for string in strings]):
            if not self._ends or not _begins(end, self._ends[-1]):
                self._ends.append(end)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        rows = input_ids[:, -self._longest :].tolist()
        return torch.tensor([self.ended(row) for row in rows], dtype=torch.bool, device=input_ids.device)

    def ended(self, tokens: Sequence[int]) -> bool:
        """True if a stop string ends within the last of these tokens."""
        if self._always or not tokens:
            return self._always
        last = self._texts.get(tokens[-1])
        if not last:
            return False
        reverse = last[::-1]
        wanted = len(last) + self._longest - 1
        for token in islice(reversed(tokens), 1, self._longest):
            text = self._texts.get(token)
            if text is None or len(reverse) >= wanted:
                break  # no string extends past a token without text
            reverse += text[::-1]  # type: ignore[operator]  # both are str, or both bytes
        return any(self._found(reverse[place : place + self._longest]) for place in range(len(last)))

    def _found(self, reverse: Text) -> bool:
        """True if some string ends where this text, read backwards, begins."""
        place = bisect_right(self._ends, reverse)
        return place > 0 and _begins(reverse, self._ends[place - 1])


def _begins(text: Text, beginning: Text) -> bool:
    return text[: len(beginning)] == beginning


class StopLists:
    """Makes criteria of stop strings, and keeps what it has made: most requests come with the same lists."""

    def __init__(self) -> None:
        self._vocabulary: tuple[tuple[Any, ...], dict[int, Text]] | None = None
        self._made: OrderedDict[tuple[Text, ...], StopStrings] = OrderedDict()

    def criterion(self, tokenizer: Any, strings: Any) -> StopStrings:
        """The criterion of a string or a list of strings, as `stop_strings` of generate()."""
        listed = list(strings) if isinstance(strings, list | tuple | set) else [strings]
        wrong = [string for string in listed if not isinstance(string, str)]
        if wrong or not listed:
            got = f"{type(wrong[0]).__name__} {wrong[0]!r:.60}" if wrong else "an empty list"
            raise ValueError(
                f"stop_strings is a string or a list of strings, got {got}; leave it out for none"
            )
        mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
        texts = self._texts(tokenizer, mode)
        key = tuple(StopStringCriteria._get_stop_strings_for_matching(tuple(listed), mode))
        if key not in self._made:
            _require_an_end(key, texts)
            self._made[key] = StopStrings(key, texts)
        self._made.move_to_end(key)
        if len(self._made) > KEPT:
            self._made.popitem(last=False)
        return self._made[key]

    def _texts(self, tokenizer: Any, mode: str | None) -> dict[int, Text]:
        """The text of every token as transformers' criterion reads it, kept while the vocabulary is the
        same.
        """
        # The objects themselves are kept: a new object may get the id of one that is gone.
        now = (tokenizer, getattr(tokenizer, "backend_tokenizer", None), len(tokenizer), mode)
        if self._vocabulary is None or not _same(self._vocabulary[0], now):
            texts, ids = StopStringCriteria.clean_tokenizer_vocab(tokenizer, stop_string_matching_mode=mode)
            self._vocabulary = now, dict(zip(ids, texts, strict=True))
            self._made.clear()
        return self._vocabulary[1]


def _same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    pairs = zip(before, now, strict=True)
    return all(one is other or (isinstance(one, (int, str)) and one == other) for one, other in pairs)


def _require_an_end(strings: Sequence[Text], texts: Mapping[int, Text]) -> None:
    """Raise if no token can end any of the strings, as transformers does."""
    first = {text[:1] for text in texts.values()}
    if any(string[-1:] in first for string in strings):  # "" is in it only if there are tokens without a text
        return
    for string in strings:
        ends = {string[-count:] for count in range(1, len(string) + 1)}
        known: Any = texts.values()
        if any(string in text or not ends.isdisjoint(_beginnings(text)) for text in known):
            return
    raise ValueError(
        f"no token of the vocabulary can end one of the {len(strings)} stop strings; they have characters "
        "that the tokenizer does not know, leave them out"
    )


def _beginnings(text: Text) -> list[Text]:
    return [text[:count] for count in range(1, len(text) + 1)]
