"""How many replicas there should be: as many as hold the future peak of all requests."""

from __future__ import annotations

from typing import Any

FUTURE_PEAK = "future_peak"
"""The share of a replica's blocks that all its requests, waiting ones too, will hold at their peak (C40)."""
ROWS = "rows"
"""The requests of a replica over the sequences that it runs at once."""


class FuturePeakPolicy:
    """A policy of Ray Serve's autoscaler, for `autoscaling_config.policy.policy_function`.

    Ray's default counts requests, and a request of 100 tokens counts as much as one of 100,000. This one adds
    up what the requests of all replicas will need at their peak. Ray applies delays and bounds afterwards.
    """

    def __init__(self, target: float = 0.8) -> None:
        """target: the share of its blocks and rows that each replica should come to use."""
        if not 0 < target <= 1:
            raise ValueError(f"target={target} is not a share of a replica; give more than 0, at most 1")
        self._target = target

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number of replicas for an AutoscalingContext, which need not be whole, and no state."""
        metrics = context.aggregated_metrics or {}
        needs = [sum(metrics[name].values()) for name in (FUTURE_PEAK, ROWS) if metrics.get(name)]
        if not needs:  # no replica has reported yet
            return context.target_num_replicas, {}
        return max(needs) / self._target, {}
