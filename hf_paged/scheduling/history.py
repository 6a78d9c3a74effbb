"""How long answers have been: what is known about those that are still being written."""

from __future__ import annotations

from collections import deque

ENDLESS = 0
"""Marks an answer that reached its limit: its full length is not known."""


class AnswerLengths:
    """The lengths of the last `keep` answers, counted so that adding one and asking for one take O(log of the
    longest).

    A Fenwick tree: `_tree[i]` counts the answers whose length lies in (i - (i & -i), i]. Answers that reached
    their limit are longer than all others. The first to end are the short ones: `doubt` more endless ones
    count from the beginning, so that few prove little.
    """

    def __init__(self, keep: int = 1024, doubt: int = 1) -> None:
        if keep < 0 or doubt < 0:
            raise ValueError(f"keep={keep} and doubt={doubt} must be 0 or more")
        self.keep, self.doubt = keep, doubt
        self._lengths: deque[int] = deque()
        self._tree = [0, 0]
        self._ended = 0
        """How many of the answers came to an end of their own."""

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, length: int, limited: bool = False) -> None:
        """An answer of `length` tokens is over; `limited`: because it was not allowed to be longer."""
        if length < 1:
            raise ValueError(f"an answer has 1 token or more, got {length}")
        entry = ENDLESS if limited else length
        self._lengths.append(entry)
        self._count(entry, 1)
        if len(self._lengths) > self.keep:
            self._count(self._lengths.popleft(), -1)

    def expected(self, said: int, most: int, share: float) -> int:
        """The length that `share` of the answers longer than `said` tokens stay within; never above `most`.

        `most` if no such answer is known.
        """
        if not 0 <= share < 1:
            raise ValueError(f"share={share} is not in [0, 1)")
        if not self._lengths:
            return most
        shorter = self._up_to(said)
        rank = int(share * (len(self._lengths) - shorter + self.doubt))
        return min(most, self._place(shorter + rank)) if shorter + rank < self._ended else most

    def _count(self, length: int, change: int) -> None:
        if length == ENDLESS:
            return
        while length >= len(self._tree):
            # The next power of two counts every answer so far; none lies between.
            size = len(self._tree) - 1
            self._tree += [0] * (size - 1) + [self._ended]
        self._ended += change
        while length < len(self._tree):
            self._tree[length] += change
            length += length & -length

    def _up_to(self, length: int) -> int:
        """How many ended with at most `length` tokens."""
        count, place = 0, min(length, len(self._tree) - 1)
        while place > 0:
            count += self._tree[place]
            place &= place - 1
        return count

    def _place(self, rank: int) -> int:
        """The length of the answer that `rank` others do not exceed."""
        place, step = 0, len(self._tree) - 1
        while step:
            if place + step < len(self._tree) and self._tree[place + step] <= rank:
                place += step
                rank -= self._tree[place]
            step //= 2
        return place + 1
