"""Cached blocks that follow the same prefix: which of them shares the most leading tokens with a prompt."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from operator import itemgetter
from typing import Any


class PartialBlockIndex:
    """Blocks by the prefix they follow, sorted by their tokens: the best match is a neighbour of the tokens
    searched for.

    However many blocks follow one prefix (thousands after one system prompt, or after one that an attacker
    chose), a search takes a few comparisons.
    """

    def __init__(self) -> None:
        self._of: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._of.values())

    def add(self, parent_key: bytes, tokens: tuple[int, ...], block: int) -> None:
        """Add `block`, which holds `tokens` after the prefix that `parent_key` names."""
        insort(self._of.setdefault(parent_key, []), (tokens, block))

    def remove(self, parent_key: bytes, tokens: tuple[int, ...], block: int) -> None:
        """Forget a block that was noted."""
        entries = self._of[parent_key]
        del entries[bisect_left(entries, (tokens, block))]
        if not entries:
            del self._of[parent_key]

    def best(self, parent_key: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The block that begins with most of `tokens`, and with how many; None if none begins with the first
        of them.
        """
        entries = self._of.get(parent_key, [])
        wanted = tuple(tokens)
        place = bisect_left(entries, (wanted, -1))
        neighbours = entries[max(0, place - 1) : place + 1]
        near = [(block, leading(content, wanted)) for content, block in neighbours]
        best = max(near, key=lambda one: one[1], default=None)
        return best if best is not None and best[1] else None

    def longest(self, parent_key: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The block that holds most of the first of `tokens`, and nothing else; and how many these are."""
        entries = self._of.get(parent_key, [])
        wanted = tuple(tokens)
        while place := bisect_right(entries, wanted, key=itemgetter(0)):
            content, block = entries[place - 1]
            common = leading(content, wanted)
            if common == len(content):
                return block, common
            wanted = wanted[:common]  # whatever holds more of them would stand behind this one
        return None

    def next_longer(self, parent_key: bytes, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold `tokens` and more, but for those that begin with all tokens of another one."""
        entries = self._of.get(parent_key, [])
        wanted = tuple(tokens)
        found = []
        place = bisect_right(entries, wanted, key=itemgetter(0))
        while place < len(entries) and entries[place][0][: len(wanted)] == wanted:
            content, block = entries[place]
            found.append(block)
            place = bisect_right(entries, content, place, key=lambda entry: entry[0][: len(content)])
        return found

    def clear(self) -> None:
        """Forget all."""
        self._of.clear()


def leading(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements two lists or two tuples begin with alike."""
    same, most = 0, min(len(one), len(other))
    while same < most:  # in halves, which are compared faster than one by one
        half = (same + most + 1) // 2
        if one[same:half] == other[same:half]:
            same = half
        else:
            most = half - 1
    return same
