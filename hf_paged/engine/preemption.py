"""How a preempted group leaves: swapped to the host's memory, or to be recomputed."""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import Any

from ..scheduling import StepPlan, Victim
from .worker.pools import Pools

GATHERED = 50
"""So many measured steps are entered together."""
PATIENCE = 50
"""After so many times that computing again was cheaper, a swap is tried all the same: it may have become
cheaper.
"""
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


class Preemption:
    """Decides for the scheduler, by the measured times of steps and swaps.

    mode: "swap" and "recompute" always; "auto" takes what costs less. The choice changes when tokens come,
        not which.
    """

    def __init__(self, pools: Pools, mode: str) -> None:
        self.pools = pools
        self.mode = mode
        self.out = Curve()
        self.back = Curve()
        """Seconds that swaps hold up the steps, by bytes."""
        self.steps = Curve()
        """Seconds of steps, by tokens."""
        self._usual: deque[int] = deque(maxlen=2 * LATELY + 1)
        """Tokens of the last steps: what is computed again comes on top of such a one."""
        self._declined = 0
        self._measured = mode == "auto" and pools.swaps
        self._steps: list[tuple[int, float]] = []
        """Tokens and seconds of steps that are not entered yet."""
        self._exposed = self._copied = 0.0
        self._carried = {True: 0, False: 0}
        self._tokens = 0
        self._seconds = 0.0

    def decide(self, victim: Victim) -> bool:
        """True if this group is swapped; if so the host has room for it."""
        if self.mode == "recompute" or not self.pools.swaps:
            return False
        if self.mode == "auto":
            self._enter_measurements()
            if not self.swap_is_better(self.pools.bytes_of(victim.blocks), victim.tokens):
                return False
        return self.pools.reserve(victim.blocks)

    def measure(self, plan: StepPlan, seconds: float) -> None:
        """The tokens of a plan have reached the host after so many seconds of its own.

        A plan without sampled tokens returns nothing to wait for: its time is counted in the next one.
        """
        if not self._measured:
            return
        if plan.swaps.out or plan.swaps.back:
            self._tokens = 0
            self._seconds = 0.0
            return
        self._tokens += plan.batch.tokens
        self._seconds += seconds
        if plan.batch.decodes or plan.batch.sampled:
            self._steps.append((self._tokens, self._seconds))
            if len(self._steps) >= GATHERED:
                self._enter_measurements()
            self._tokens = 0
            self._seconds = 0.0

    def _enter_measurements(self) -> None:
        """Enter what was measured since the last time."""
        for tokens, seconds in self._steps:
            self.enter_step(tokens, seconds)
        self._steps.clear()
        for transfer in self.pools.transfers():
            (self.out if transfer.out else self.back).add(transfer.bytes, transfer.exposed)
            self._exposed += transfer.exposed
            self._copied += transfer.copied
            self._carried[transfer.out] += transfer.bytes

    def enter_step(self, tokens: int, seconds: float) -> None:
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

    def stats(self) -> dict[str, Any]:
        """Bytes that went out and came back, as far as that is over; the seconds that copying took, and by
        which steps were held up.
        """
        self._enter_measurements()
        return {
            "bytes_out": self._carried[True],
            "bytes_in": self._carried[False],
            "copied": self._copied,
            "exposed": self._exposed,
        }
