"""How a preempted group leaves: swapped to the host's memory, or to be recomputed."""

from __future__ import annotations

from typing import Any

from ..scheduling import StepPlan, Victim
from .costs import Costs
from .pools import Pools

GATHERED = 50
"""So many measured steps are entered together."""


class Preemption:
    """Decides for the scheduler, by the measured times of steps and swaps.

    mode: "swap" and "recompute" always; "auto" takes what costs less. The choice changes when tokens come,
        not which.
    """

    def __init__(self, pools: Pools, mode: str) -> None:
        self.pools = pools
        self.mode = mode
        self.costs = Costs()
        self._measured = mode == "auto" and pools.swaps
        self._steps: list[tuple[int, float]] = []
        """Tokens and seconds of steps that are not entered yet."""
        self._exposed = self._copied = 0.0
        self._carried = {True: 0, False: 0}
        self._tokens = 0
        self._seconds = 0.0

    def decide(self, victim: Victim) -> bool:
        """Whether this group is swapped; if so the host has room for it."""
        if self.mode == "recompute" or not self.pools.swaps:
            return False
        if self.mode == "auto":
            self._enter_measurements()
            if not self.costs.swap_is_better(self.pools.bytes_of(victim.blocks), victim.tokens):
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
            self.costs.step(tokens, seconds)
        self._steps.clear()
        for trip in self.pools.trips():
            (self.costs.out if trip.out else self.costs.back).add(trip.bytes, trip.exposed)
            self._exposed += trip.exposed
            self._copied += trip.copied
            self._carried[trip.out] += trip.bytes

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
