"""What it costs to swap a group, and what to compute it again, by what was measured."""

from __future__ import annotations

from collections import deque
from statistics import median_low

LATELY = 7
"""How many measurements of a size are remembered; the lower median of them counts, so one that was held up
does not.
"""
ENOUGH = 3
"""Before so many measurements nothing is known."""
PATIENCE = 50
"""After so many times that computing again was cheaper, a swap is tried all the same: it may have become
cheaper.
"""


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


class Costs:
    """Swaps by bytes, steps by tokens."""

    def __init__(self) -> None:
        self.out = Curve()
        self.back = Curve()
        self.steps = Curve()
        self._usual: deque[int] = deque(maxlen=2 * LATELY + 1)
        """Tokens of the last steps: what is computed again comes on top of such a one."""
        self._declined = 0

    def step(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self.steps.add(tokens, seconds)
        self._usual.append(tokens)

    def of_swap(self, bytes: int) -> float | None:
        """Seconds by which swapping so much out and in delays the steps."""
        out = self.out.at(bytes)
        back = self.back.at(bytes)
        return None if out is None or back is None else out + back

    def of_recomputation(self, tokens: int) -> float | None:
        """Seconds by which recomputing so many tokens lengthens the steps.

        Hits in the prefix cache are not counted: where blocks run out it is evicted first.
        """
        usual = median_low(self._usual) if self._usual else 0
        alone = self.steps.at(usual)
        together = self.steps.at(usual + tokens)
        return None if alone is None or together is None else max(0.0, together - alone)

    def swap_is_better(self, bytes: int, tokens: int) -> bool:
        """Which of the two is cheaper; what was not measured yet is swapped, and so measured."""
        swap = self.of_swap(bytes)
        recomputation = self.of_recomputation(tokens)
        better = swap is None or recomputation is None or swap <= recomputation or self._declined >= PATIENCE
        self._declined = 0 if better else self._declined + 1
        return better
