"""Those who do nothing but decode: what a step of them costs is what happens in it, and the books are
everybody's.
"""

from __future__ import annotations

import random

import pytest
from scheduling_prompts import prompt
from simulated import Simulated

from hf_paged.scheduling import Request


def places(world: Simulated) -> dict[int, int]:
    return {
        sequence.group.request.number: place for place, sequence in enumerate(world.scheduler.crew.sequences)
    }


def test_whoever_decodes_joins_and_the_last_one_takes_the_place_of_who_leaves() -> None:
    world = Simulated.of(total=60, tokens=40, sequences=8)
    groups = [world.submit(Request(i, prompt(3 + i, i), 30)) for i in range(4)]
    plan = world.step()
    assert plan.stride is None
    assert len(plan.others) == 4
    plan = world.step()
    assert places(world) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert plan.stride is not None
    assert not plan.others
    assert [(row.start, row.count) for row in plan.rows] == [(3, 1), (4, 1), (5, 1), (6, 1)]
    assert world.step().stride.sequences is plan.stride.sequences  # type: ignore[union-attr]  # nobody came or went
    assert world.scheduler.crew.stands(plan.stride)
    world.scheduler.abort(groups[1])
    assert not world.scheduler.crew.stands(plan.stride)
    world.scheduler.check()
    assert places(world) == {0: 0, 3: 1, 2: 2}
    assert world.step().stride.sequences is not plan.stride.sequences  # type: ignore[union-attr]
    world.scheduler.preempt(groups[0])
    assert places(world) == {2: 0, 3: 1}
    world.run()
    world.assert_answered()
    world.assert_empty()


def test_a_block_is_taken_and_named_when_the_one_before_is_full() -> None:
    """C1, C2, C17."""
    world = Simulated.of(total=60, size=4, tokens=40)
    group = world.submit(Request(0, prompt(6), 40))
    world.step()
    for _ in range(20):
        before = len(group.leader.tables[0].blocks)
        plan = world.step()
        assert plan.stride is not None
        grown = len(group.leader.tables[0].blocks) - before
        assert grown == ((group.leader.computed - 1) % 4 == 0)
        assert plan.stride.filled == (
            ((group.leader, group.leader.computed),) if group.leader.computed % 4 == 0 else ()
        )
        assert len(group.leader.tables[0].digests) == group.leader.computed // 4


def test_who_gets_the_last_token_is_known_before() -> None:
    world = Simulated.of(total=60, tokens=40)
    for number, most in enumerate((9, 7, 9)):
        world.submit(Request(number, prompt(4, number), most))
    world.step()
    seen = []
    while world.scheduler.unfinished:
        plan = world.step()
        assert plan.stride is not None
        seen.append(sorted(plan.stride.sequences[place].group.request.number for place in plan.stride.last))
    assert seen == [[], [1], [], [0, 2]]


@pytest.mark.parametrize(
    ("request_", "why"),
    [(Request(0, prompt(5), 12, width=2), "two"), (Request(0, prompt(5), 12, steady=False), "no")],
)
def test_who_is_more_than_a_token_a_step_stays_outside(request_: Request, why: str) -> None:
    world = Simulated.of(total=60, tokens=40)
    world.submit(request_)
    for plan in world.run():
        assert plan.stride is None
    world.assert_answered()


@pytest.mark.parametrize("seed", range(6))
def test_the_crew_changes_no_answer(seed: int) -> None:
    """Walks with some in the crew and some not, few blocks, aborts and preemptions; everything recounted
    after every step.
    """
    rng = random.Random(seed)
    world = Simulated.of(
        total=26, size=rng.choice([1, 2, 4]), window=rng.choice([None, 6]), tokens=12, sequences=6, host=12
    )
    alive = []
    for number in range(24):
        tokens = prompt(rng.randrange(1, 9), rng.randrange(3))
        alive.append(
            world.submit(
                Request(number, tokens, len(tokens) + rng.randrange(1, 9), steady=rng.random() < 0.7)
            )
        )
        for _ in range(rng.randrange(4)):
            world.step()
        if rng.random() < 0.2 and world.scheduler.running:
            world.scheduler.preempt(rng.choice(world.scheduler.running), swap=rng.random() < 0.5)
        if rng.random() < 0.1:
            world.scheduler.abort(rng.choice(alive))
    world.run()
    world.assert_answered()
    world.assert_empty()
    assert not world.scheduler.crew
