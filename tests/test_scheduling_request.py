"""Sequences of one request: their prompt is computed once, and they go and come back as one."""

from __future__ import annotations

from scheduling_prompts import prompt
from simulated import Simulated

from hf_paged.scheduling import Request, Status


def test_samples_share_their_prompt() -> None:
    """C6, C13, C14: a prompt is computed once for all samples, full blocks are shared, the last is copied n -
    1 times.
    """
    world = Simulated.of(total=40, size=4, tokens=32)
    group = world.submit(Request(0, prompt(10), 20, width=3))
    world.step()
    assert world.computed == 10
    assert world.pools[0].held == 3
    assert [sequence.tables[0].blocks for sequence in group.sequences] == [group.leader.tables[0].blocks] * 3
    plan = world.step()
    assert len(plan.copies[0]) == 2
    assert world.pools[0].held == 2 + 3
    world.run()
    world.assert_answered()


def test_a_group_goes_and_comes_back_as_one() -> None:
    """C30: after a preemption the common part is computed once again and shared again."""
    world = Simulated.of(total=40, size=4, tokens=32, prefix_caching=False)
    group = world.submit(Request(0, prompt(10), 20, width=3))
    for _ in range(4):
        world.step()
    world.scheduler.preempt(group)
    assert world.pools[0].held == 0
    world.computed = 0
    plan = world.step()
    assert [row.count for row in plan.rows] == [group.common]
    shared = group.common // 4
    world.run()
    assert shared >= 2
    assert world.computed == group.common + sum(
        len(tokens) - 1 - group.common for tokens in world.answers[0].values()
    )
    world.assert_answered()


def test_beams_are_reordered_in_the_tables() -> None:
    """C16: what only dropped beams named is free again; a step takes at most a block a beam."""
    world = Simulated.of(total=34, size=2, tokens=32)
    group = world.submit(Request(0, prompt(5), 20, width=4), beams=True)
    while group.status is not Status.FINISHED:
        before = world.pools[0].held
        plan = world.step()
        assert world.pools[0].held <= before + 4 or plan.admitted
        assert len(plan.copies[0]) <= 4
    world.assert_answered()
    world.assert_empty()
