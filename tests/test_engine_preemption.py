"""Swap or compute again, by made-up measurements (C31)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_paged.engine.preemption import ENOUGH, LATELY, PATIENCE, Curve, Preemption

MB = 1 << 20
NO_POOLS: Any = SimpleNamespace(swaps=False)


def measured(
    rate: float = 1e-9, latency: float = 0.0, tokens: float = 1e-5, step: float = 5e-3
) -> Preemption:
    """Swaps at 1 / rate bytes a second after a latency, steps of a fixed time and some seconds for every
    token.
    """
    costs = Preemption(NO_POOLS, "auto")
    for size in (1 * MB, 4 * MB, 16 * MB):
        costs.out.add(size, latency + rate * size)
        costs.back.add(size, latency + rate * size)
    for count in (64, 300, 1024, 2048, 64, 64):
        costs.enter_step(count, step + tokens * count)
    return costs


def test_nothing_is_known_at_first() -> None:
    """Then it is swapped, and so it becomes known: the same every time."""
    costs = Preemption(NO_POOLS, "auto")
    assert costs.of_swap(MB) is costs.of_recomputation(100) is None
    assert [costs.swap_is_better(MB, 1) for _ in range(3 * PATIENCE)] == [True] * (3 * PATIENCE)
    for _ in range(ENOUGH):
        costs.out.add(MB, 1.0)
        costs.back.add(MB, 1.0)
    assert costs.of_swap(MB) == pytest.approx(2.0)
    assert costs.swap_is_better(MB, 1)  # no step was measured
    for _ in range(ENOUGH):
        costs.enter_step(10, 1e-3)
    assert not costs.swap_is_better(MB, 1)


def test_the_cheaper_one() -> None:
    """2 ns a byte there and back, 10 us a token: 5,000 bytes a token are worth it."""
    costs = measured()
    assert costs.of_swap(4 * MB) == pytest.approx(2e-9 * 4 * MB, rel=0.01)
    assert costs.of_recomputation(1000) == pytest.approx(1e-2, rel=0.15)
    assert costs.swap_is_better(4 * MB, 2000)
    assert not costs.swap_is_better(4 * MB, 500)


def test_what_every_step_costs_is_not_counted() -> None:
    """Tokens computed again come on top of a step that runs anyway."""
    slow, quick = measured(step=1.0), measured(step=1e-3)
    assert slow.of_recomputation(500) == pytest.approx(quick.of_recomputation(500), rel=0.15)


def test_a_latency_decides_about_small_groups() -> None:
    costs = measured(latency=2e-3, tokens=1e-6)
    assert not costs.swap_is_better(MB // 10, 100)
    assert measured(latency=0.0, tokens=1e-6).swap_is_better(MB // 100, 100)


def test_one_measurement_that_was_held_up_does_not_count() -> None:
    costs = measured()
    right = costs.of_swap(4 * MB)
    costs.out.add(4 * MB, 60.0)
    assert costs.of_swap(4 * MB) == right
    for _ in range(LATELY):  # but if it stays so
        costs.out.add(4 * MB, 60.0)
    assert costs.of_swap(4 * MB) > 60


def test_what_has_become_cheaper_is_found_out() -> None:
    """After a while of computing again a swap is tried."""
    costs = measured(rate=1.0)
    assert [costs.swap_is_better(MB, 1) for _ in range(2 * PATIENCE + 2)].count(True) == 2


def test_a_curve_between_and_beyond() -> None:
    curve = Curve()
    for size, seconds in ((100, 1.0), (0, 9.0), (1000, 4.0), (1010, -1.0), (1000, 4.0)):
        curve.add(size, seconds)
    assert curve.count == 3
    assert [curve.at(size) for size in (0, 50, 100, 550, 1000, 3000)] == pytest.approx(
        [0.0, 0.5, 1.0, 2.5, 4.0, 12.0]
    )
