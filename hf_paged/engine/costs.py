"""Seconds by size, by what was measured: of swaps by bytes, of steps by tokens."""

from __future__ import annotations

from collections import deque
from statistics import median_low

LATELY = 7
"""How many measurements of a size are remembered; the lower median of them counts, so one that was held up
does not.
"""
ENOUGH = 3
"""Before so many measurements nothing is known."""


class Curve:
    """Seconds by size: sizes of one power of two are taken together, with straight lines between them and
    from nothing.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lately: dict[int, deque[tuple[float, int]]] = {}
        self._points: list[tuple[float, float]] | None = None
        """Sizes and seconds, until something new is measured."""

    def add(self, size: int, seconds: float) -> None:
        """Note a measurement."""
        if size <= 0 or seconds < 0:
            return
        self.count += 1
        self._lately.setdefault(size.bit_length(), deque(maxlen=LATELY)).append((seconds / size, size))
        self._points = None

    def at(self, size: float) -> float | None:
        """Seconds of a size, None if too little was measured. Beyond the largest every further one costs as
        much as those.
        """
        if self.count < ENOUGH:
            return None
        if self._points is None:
            self._points = self._line()
        for (left, low), (right, high) in zip(self._points, self._points[1:], strict=False):
            if size <= right:
                return low + (high - low) * (size - left) / (right - left)
        largest, seconds = self._points[-1]
        return seconds * size / largest

    def _line(self) -> list[tuple[float, float]]:
        points = [(0.0, 0.0)]
        for _, measured in sorted(self._lately.items()):
            mean = sum(size for _, size in measured) / len(measured)
            points.append((mean, mean * median_low(rate for rate, _ in measured)))
        return points
