"""How long answers have been: what is known about those that are still being written."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque


class AnswerLengths:
    """The lengths of the last `keep` answers.

    Answers that reached their limit count as longer than all others: their full length is not known. The
    first to end are the short ones: `doubt` more answers without an end count from the beginning, so that few
    prove little.
    """

    def __init__(self, keep: int = 1024, doubt: int = 1) -> None:
        if keep < 0 or doubt < 0:
            raise ValueError(f"keep={keep} and doubt={doubt} must be 0 or more")
        self.keep = keep
        self.doubt = doubt
        self._answers: deque[int | None] = deque()
        """In the order in which they ended; None for one that reached its limit."""
        self._lengths: list[int] = []
        """The lengths that are known, sorted."""

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, length: int, limited: bool = False) -> None:
        """An answer of `length` tokens is over; `limited`: because it was not allowed to be longer."""
        if length < 1:
            raise ValueError(f"an answer has 1 token or more, got {length}")
        self._answers.append(None if limited else length)
        if not limited:
            insort(self._lengths, length)
        if len(self._answers) > self.keep:
            oldest = self._answers.popleft()
            if oldest is not None:
                del self._lengths[bisect_left(self._lengths, oldest)]

    def expected(self, generated: int, most: int, share: float) -> int:
        """The length that `share` of the answers longer than `generated` tokens stay within; never above
        `most`.

        `most` if no such answer is known.
        """
        if not 0 <= share < 1:
            raise ValueError(f"share={share} is not in [0, 1)")
        if not self._answers:
            return most
        shorter = bisect_right(self._lengths, generated)
        place = shorter + int(share * (len(self._answers) - shorter + self.doubt))
        return min(most, self._lengths[place]) if place < len(self._lengths) else most
