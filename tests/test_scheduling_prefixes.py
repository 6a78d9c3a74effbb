"""Prefixes that groups share: twins wait for each other, and leave what they have computed to later ones."""

from __future__ import annotations

import pytest
from scheduling_prompts import prompt
from simulated import Simulated

from hf_paged.scheduling import Request


def test_a_twin_waits_for_the_blocks_of_the_first() -> None:
    """It begins when the first has computed them, and computes none of them again."""
    world = Simulated.of(total=40, size=4, tokens=8)
    first = world.submit(Request(0, prompt(14), 20))
    twin = world.submit(Request(1, prompt(14), 20))
    assert world.step().admitted == (first,)
    assert not world.scheduler.prefixes.idle
    plans = [world.step() for _ in range(2)]
    assert plans[-1].admitted == (twin,)
    assert world.scheduler.prefixes.idle
    assert twin.cached_tokens == 12  # its full blocks but that of its last token
    world.run()
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize("leaves", ["abort", "preempt"])
def test_nobody_waits_for_a_group_that_leaves(leaves: str) -> None:
    world = Simulated.of(total=40, size=4, tokens=8)
    first = world.submit(Request(0, prompt(14), 20))
    twin = world.submit(Request(1, prompt(14), 20))
    world.step()
    getattr(world.scheduler, leaves)(first)
    assert world.scheduler.prefixes.idle
    admitted = [group for _ in range(2) for group in world.step().admitted]
    assert admitted[0] is (twin if leaves == "abort" else first)
    world.run()
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize("sharing", [True, False])
def test_a_sequence_that_ends_leaves_its_blocks(sharing: bool) -> None:
    """C17: to the last token that was computed, also in a block that is not full."""
    world = Simulated.of(total=40, size=4, tokens=30, prefix_caching=sharing)
    world.submit(Request(0, prompt(6), 12))
    world.run()
    known = world.answers[0][0]
    later = world.submit(Request(1, (*known, 1, 2), 20))
    world.step()
    assert later.cached_tokens == (len(known) - 1 if sharing else 0)
    assert (world.scheduler.counts["hits"] > 0) == sharing
    world.run()
    world.assert_answered()
    world.assert_empty()
