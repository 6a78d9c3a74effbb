"""Sequences that only decode: a block is taken when the one before is full, and walks of joining and leaving
requests change no answer.
"""

from __future__ import annotations

import random

import pytest
from cases import examples
from scheduling_prompts import prompt
from simulated import Simulated

from hf_paged.scheduling import Request, StepPlan


def decoded(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Of every row the request's number, the start and the count, in order of the number."""
    return sorted((row.sequence.group.request.number, row.start, row.count) for row in plan.rows)


def test_every_sequence_takes_one_token_a_step_while_others_join_and_leave() -> None:
    world = Simulated.of(total=60, tokens=40, sequences=8)
    groups = [world.submit(Request(i, prompt(3 + i, i), 30)) for i in range(4)]
    assert decoded(world.step()) == [(i, 0, 3 + i) for i in range(4)]
    assert decoded(world.step()) == [(i, 3 + i, 1) for i in range(4)]
    assert decoded(world.step()) == [(i, 4 + i, 1) for i in range(4)]
    world.scheduler.abort(groups[1])
    world.scheduler.check()
    assert decoded(world.step()) == [(i, 5 + i, 1) for i in (0, 2, 3)]
    world.scheduler.preempt(groups[0])
    assert decoded(world.step())[1:] == [(2, 8, 1), (3, 9, 1)]
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
        world.step()
        grown = len(group.leader.tables[0].blocks) - before
        assert grown == ((group.leader.computed - 1) % 4 == 0)
        assert len(group.leader.tables[0].digests) == group.leader.computed // 4


def test_each_ends_with_its_last_token() -> None:
    world = Simulated.of(total=60, tokens=40)
    for number, most in enumerate((9, 7, 9)):
        world.submit(Request(number, prompt(4, number), most))
    running = []
    while world.scheduler.unfinished:
        running.append([number for number, _, _ in decoded(world.step())])
    assert running == [[0, 1, 2]] * 3 + [[0, 2]] * 2


@pytest.mark.parametrize("width", [1, 3])
def test_requests_that_are_planned_row_by_row(width: int) -> None:
    world = Simulated.of(total=60, tokens=40)
    world.submit(Request(0, prompt(5), 12, width, batchable=False))
    while world.scheduler.unfinished:
        assert not world.step().batch.decodes
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize("size", [1, 4])
def test_samples_decode_together_once_their_blocks_are_their_own(size: int) -> None:
    """C13: a step behind the fork each writes into its own copy; then all are in the batch until they end."""
    world = Simulated.of(total=90, size=size, tokens=40)
    group = world.submit(Request(0, prompt(5), 20, width=3))
    steps = []
    while world.scheduler.unfinished:
        running = len(group.sequences)
        steps.append((running, world.step().batch.decodes))
    first = steps.index((3, 3))
    assert first <= 2
    assert all(running == decodes for running, decodes in steps[first:])
    assert {running for running, _ in steps[first:]} > {3}  # one ended before the others
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize("advances", [True, False])
@pytest.mark.parametrize("seed", range(examples(9)))
def test_rows_advance_by_any_number_of_tokens(seed: int, advances: bool) -> None:
    """Known tokens, guesses right and wrong, waiting, beams, aborts and preemptions with tokens pending, or one token
    a row in few blocks: every answer is right, and the books are recounted after every step.
    """
    rng = random.Random(seed)
    world = Simulated.of(
        total=rng.choice([75, 100]) if advances else 40, size=rng.choice([1, 2, 4]), window=rng.choice([None, 3, 6]),
        tokens=rng.choice([8, 12, 30]), sequences=8, host=rng.choice([None, 12]), advances=rng if advances else None,
        verify=rng.random() < 0.5, admission=rng.choice(["watermark", "future"]),
    )  # fmt: skip
    alive = []
    for number in range(24):
        tokens = prompt(rng.randrange(1, 9), rng.randrange(3))
        most = len(tokens) + rng.randrange(1, 16 if advances else 9)
        width = rng.choice([1, 1, 2, 3])
        asked = Request(number, tokens, most, width, batchable=rng.random() < 0.8)
        alive.append(world.submit(asked, beams=width > 1 and rng.random() < 0.3))
        for _ in range(rng.randrange(5)):
            world.step()
        if rng.random() < 0.2 and world.scheduler.running:
            world.scheduler.preempt(rng.choice(world.scheduler.running), swap=rng.random() < 0.5)
        if rng.random() < 0.1:
            world.scheduler.abort(rng.choice(alive))
    world.run()
    world.assert_answered()
    world.assert_empty()
    assert not advances or world.advanced.total() > 9


@pytest.mark.parametrize("swap", [False, True])
def test_a_group_that_awaits_a_token_is_not_admitted_before_it_is_there(swap: bool) -> None:
    """C30: preempted while its step is in flight; the token is neither lost nor computed twice."""
    world = Simulated.of(total=60, size=4, tokens=40, host=20)
    group = world.submit(Request(0, prompt(6), 12))
    other = world.submit(Request(1, prompt(5, 1), 12))
    world.step()
    plan = world.scheduler.schedule()
    values = {row.sequence: world.compute(row.sequence, row.start, row.count) for row in plan.rows}
    world.scheduler.launch(plan)
    world.scheduler.preempt(group, swap=swap)
    ahead = world.scheduler.schedule()
    assert [row.sequence for row in ahead.rows] == [other.leader]
    world.carry(ahead.swaps)
    world.scheduler.confirm(plan)
    for waiting in (group, other):
        world.choose(waiting, {waiting.leader: values[waiting.leader]})
    world.scheduler.commit(ahead)
    world.choose(other, {other.leader: world.compute(other.leader, ahead.rows[0].start, 1)})
    world.run()
    world.assert_answered()
    world.assert_empty()
