"""Kinds of layers side by side under one scheduler: blocks of different sizes, and a kind whose one block is never
full.

Held here: C7, C9, C14, C18, C21, C22, C28 to C30, C34, for pools of one to sixteen tokens a block.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_prompts import squares as prompt
from scheduling_requests import one_request
from simulated import Simulated

from hf_paged.blocks import Full, LayerKind, State, Window
from hf_paged.scheduling import Infeasible, Limits, Request, Status

LIMITS = Limits(64, 8, 0.0)
STATE = (State(), 12, 1)


def ended(world: Simulated, request: Request, beams: bool = False) -> int:
    """Compute a request: the tokens of its prompt that were found."""
    group = world.submit(request, beams)
    world.run()
    world.assert_answered()
    return group.cached_tokens


@pytest.mark.parametrize(
    ("sizes", "common", "hit"),
    [
        ((4, 16), 32, 32),
        ((16, 4), 40, 40),  # a part of a block of 16 is copied, and two of 4 are whole
        ((4, 16), 41, 40),  # one token more is not worth a copy of a block of 4
        ((1, 8), 43, 43),
        ((2, 8, 4), 22, 22),
    ],
)
def test_a_hit_is_what_all_pools_have(sizes: tuple[int, ...], common: int, hit: int) -> None:
    world = Simulated.mixed([(Full(), 200, size) for size in sizes], LIMITS)
    assert ended(world, Request(0, prompt(60), 63)) == 0
    other = (*prompt(60)[:common], *prompt(20, 7))
    assert ended(world, Request(1, other, len(other) + 3)) == hit
    world.assert_empty()


def test_a_hit_ends_where_one_pool_has_lost_its_blocks() -> None:
    """C18, C20: the pool of small blocks has room for half of the prompt, the other one for all of it."""
    world = Simulated.mixed([(Full(), 40, 16), (Full(), 22, 2)], LIMITS)
    ended(world, Request(0, prompt(40), 42))
    ended(world, Request(1, prompt(20, 3), 22))  # evicts the ends of the first
    small = world.pools[1]
    there = sum(
        small.names.lookup(name) is not None
        for name in world.scheduler.submit(Request(9, prompt(40), 42)).prompt.at(2).digests
    )
    assert 0 < there < 20
    world.scheduler.abort(world.scheduler.waiting[0])
    assert ended(world, Request(2, prompt(40), 42)) == 2 * there
    world.assert_empty()


def test_every_pool_takes_blocks_when_its_own_are_full() -> None:
    """C1, C2, and the steps of the decode batch; a pool without room delays all."""
    world = Simulated.mixed([(Full(), 40, 2), (Window(5), 40, 8), (Full(), 40, 16), STATE], LIMITS)
    group = world.submit(Request(0, prompt(9), 40))
    while group.status is not Status.FINISHED:
        world.step()
        if group.status is not Status.FINISHED:
            tables = group.leader.tables
            assert [table.end for table in tables] == [
                -(-table.length // size) for table, size in zip(tables, [2, 8, 16, 100], strict=True)
            ]
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize("sizes", [(2, 8), (8, 2)])
def test_equal_content_is_held_once_in_every_pool(sizes: tuple[int, ...]) -> None:
    """C17: the rows of the decode batch follow, in each pool from its own block on."""
    world = Simulated.mixed([(Full(), 60, size) for size in sizes], LIMITS)
    groups = [world.submit(Request(number, (5,), 40)) for number in range(2)]
    for _ in range(30):
        world.step()
    for i, size in enumerate(sizes):
        one, other = (group.leader.tables[i].blocks for group in groups)
        assert one[: 24 // size] == other[: 24 // size]
    world.run()
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize("narrow", range(3))
@pytest.mark.parametrize("host", [None, 60])
def test_any_pool_may_be_the_one_without_room(narrow: int, host: int | None) -> None:
    """C26 to C31: growth, preemption, swap and recomputation are decided by the pool that is full."""
    totals = [80, 80, 80]
    totals[narrow] = [14, 6, 3][narrow]
    kinds: list[LayerKind] = [Full(), Full(), State()]
    world = Simulated.mixed(zip(kinds, totals, [2, 8, 1], strict=True), LIMITS, host=host)
    for number in range(5):
        world.submit(Request(number, prompt(6, number), 22))
    world.run()
    world.assert_answered()
    world.assert_empty()
    counts = world.scheduler.counts
    assert (counts["preemptions"] > 0) == (narrow < 2)  # a state never grows: who is admitted stays
    assert (counts["swapped_out"] > 0) == (host is not None and narrow < 2)


# ---- a table of one block that is never full


def states(total: int = 12, **options) -> Simulated:
    """Full layers in blocks of 4, and recurrent ones."""
    return Simulated.mixed([(Full(), 100, 4), (State(), total, 4)], LIMITS, **options)


def test_a_sequence_of_any_length_has_one_state() -> None:
    world = states()
    group = world.submit(Request(0, prompt(3), 60))
    held = set()
    while world.scheduler.unfinished:
        world.step()
        held.add(world.pools[1].held)
    assert held == {1, 0}
    assert world.pools[1].peak_held == 1
    assert group.need(1, 64) == group.most(1, 64) == 1
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize("beams", [False, True])
def test_forks_write_in_copies(beams: bool) -> None:
    """C13, C14: the state that samples or beams have in common is there once until each writes on."""
    world = states()
    group = world.submit(Request(0, prompt(9), 30, width=3), beams)
    world.step()
    assert len({sequence.tables[1].blocks[0] for sequence in group.sequences}) == 1
    plan = world.step()
    assert len({sequence.tables[1].blocks[0] for sequence in group.sequences}) >= (1 if beams else 3)
    assert plan.copies[1]
    world.run()
    world.assert_answered()
    world.assert_empty()


def test_more_sequences_than_states_are_infeasible() -> None:
    """C11."""
    world = states(total=2)
    with pytest.raises(
        Infeasible, match=r"need 3 slots for recurrent states and 2 can be had.*raise state_slots"
    ):
        world.submit(Request(0, prompt(5), 9, width=3))


def test_a_state_is_found_by_the_tokens_it_covers() -> None:
    """C18, C21: where a snapshot was left, and nowhere between."""
    world = Simulated.mixed([(Full(), 100, 4), STATE], Limits(16, 8, 0.0))
    ended(world, Request(0, prompt(40), 43))  # it leaves them at 16, 32 and 40, and its answer at 42
    whole = world.requests[0].prompt + tuple(world.answers[0][0][40:])
    assert ended(world, Request(1, (*whole, 5, 6), 47)) == 42
    assert ended(world, Request(2, (*whole[:39], 5, 6), 47)) == 32
    assert ended(world, Request(3, (*whole[:30], 5, 6), 47)) == 16
    assert ended(world, Request(4, whole[:16], 20)) == 0  # its last token must be computed
    assert ended(world, Request(5, whole[:17], 20)) == 16
    assert ended(world, Request(6, (*whole[:15], 5, 6), 20)) == 15  # the fifth has left it
    assert ended(world, Request(7, (*whole[:14], 5, 6), 20)) == 0
    assert world.pools[1].counts["hits"] == 5
    world.assert_empty()


def test_a_found_state_stays_as_it_was() -> None:
    """C14: whoever continues from it does so in a copy, at once or one after another, and so does its owner."""
    world = Simulated.mixed([(Full(), 100, 4), STATE], Limits(16, 8, 0.0))
    ended(world, Request(0, prompt(18), 30))
    (block,) = [
        world.pools[1].names.lookup(name)
        for name in world.pools[1].names.digests().values()
        if world.pools[1].names.covered(world.pools[1].names.lookup(name)) == 16
    ]
    before = world.stores[1][block]
    groups = [world.submit(Request(number, (*prompt(16), number), 26, width=2)) for number in (1, 2, 3)]
    world.run()
    assert [group.cached_tokens for group in groups] == [16, 16, 16]
    assert world.pools[1].names.covered(block) == 16
    assert world.stores[1][block] == before
    world.assert_answered()
    world.assert_empty()


def test_names_give_way_to_sequences() -> None:
    """C9: where every block is needed, a state is overwritten rather than its sequence delayed or preempted."""
    world = states(total=3)
    for number in range(6):
        world.submit(Request(number, prompt(9, number % 2), 20, width=1 + number % 3))
    world.run()
    world.assert_answered()
    assert world.scheduler.counts["preemptions"] == 0
    world.assert_empty()


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_a_preempted_group_goes_on(swap: bool, width: int) -> None:
    """C29, C30: with its state from the host, or computed again, from a state that was found where there is one."""
    computed = []
    for preempted in (False, True):
        world = Simulated.mixed([(Full(), 100, 4), STATE], Limits(8, 8, 0.0), host=50)
        group = world.submit(Request(0, prompt(21), 40, width))
        for _ in range(9):
            world.step()
        if preempted:
            world.scheduler.preempt(group, swap=swap)
            assert [pool.held for pool in world.pools] == [0, 0]
            assert world.hosts[1].held == (width if swap else 0)
        world.run()
        world.assert_answered()
        world.assert_empty()
        computed.append(world.computed)
    assert (computed[0] == computed[1]) == swap
    assert (world.scheduler.counts["hits"] > 0) != swap
    # Of several the last token of the prompt must be computed, so they begin with an earlier state.
    assert swap or computed[1] - computed[0] == (6 if width == 1 else 21 - 16 + 6 * width)


def test_a_state_that_has_gone_on_is_not_named() -> None:
    """C22: the next chunk is launched before the host knows that the one before it is computed."""
    world = Simulated.mixed([(Full(), 100, 4), STATE], Limits(8, 8, 0.0))
    scheduler, pool = world.scheduler, world.pools[1]
    world.submit(Request(0, prompt(24), 26))
    plans = []
    for _ in range(2):
        plans.append(scheduler.schedule())
        world.copy(plans[-1])
        (row,) = plans[-1].rows
        world.compute(row.sequence, row.start, row.count)
        scheduler.launch(plans[-1])
    scheduler.confirm(plans[0])
    assert not pool.names.digests()
    scheduler.confirm(plans[1])
    assert [pool.names.covered(block) for block in pool.names.digests()] == [16]
    world.run()
    world.assert_answered()
    world.assert_empty()


def test_a_preempted_group_returns_where_states_are_just_enough() -> None:
    """C9: running sequences take no more of them, so none is kept free for these."""
    world = states(total=3)
    groups = [world.submit(Request(number, prompt(5, number), 40)) for number in range(3)]
    for _ in range(3):
        world.step()
    world.scheduler.preempt(groups[2], swap=False)
    assert world.step().admitted == (groups[2],)


def test_a_state_of_other_weights_is_not_found() -> None:
    """C22, C24."""
    world = states()
    ended(world, Request(0, prompt(16), 20))
    for pool in world.pools:
        pool.forget()
    world.salt = 5
    world.requests.clear()
    world.answers.clear()
    assert ended(world, Request(1, prompt(17), 22)) == 0
    ended(world, Request(2, (*prompt(16), 3), 20, extra=b"x"))
    assert ended(world, Request(3, (*prompt(16), 4), 20, extra=b"y")) == 0


# ---- at random


@st.composite
def worlds(draw: st.DrawFn) -> Simulated:
    sequences = draw(st.integers(1, 6))
    kinds = draw(st.permutations([Full(), Window(draw(st.sampled_from([1, 3, 9]))), State()]))
    return Simulated.mixed(
        [(kind, draw(st.integers(6, 40)), draw(st.sampled_from([1, 2, 4, 8, 16]))) for kind in kinds],
        Limits(draw(st.integers(sequences, 24)), sequences, draw(st.sampled_from([0.0, 0.1]))),
        admission=draw(st.sampled_from(["watermark", "future"])),
        verify=draw(st.booleans()),
        state_every=draw(st.sampled_from([0, 3, 16])),
        host=draw(st.sampled_from([None, 7, 60])),
    )


def trouble(world: Simulated, rng: random.Random) -> None:
    """A request, or something that happens to those that are there."""
    alive = [group for group in world.groups if group.status is not Status.FINISHED]
    what = rng.random()
    if what < 0.7 and len(alive) < 10:
        request = one_request(rng, len(world.requests))
        if world.answers and rng.random() < 0.4:  # the next turn of a talk
            number = rng.choice(list(world.answers))
            past = rng.choice([[*request.prompt], *world.answers[number].values()])
            tokens = (*past, *request.prompt[-2:])
            request = replace(
                request, prompt=tokens, most_tokens=len(tokens) + 5, extra=world.requests[number].extra
            )
        try:
            world.submit(request, beams=rng.random() < 0.4)
        except Infeasible:
            world.scheduler.check()
    elif what < 0.85 and world.scheduler.running:
        world.scheduler.preempt(rng.choice(world.scheduler.running), swap=rng.random() < 0.7)
    elif what < 0.9 and alive:
        world.scheduler.abort(rng.choice(alive))


@settings(max_examples=examples(40))
@given(world=worlds(), seed=st.integers(0, 10**6))
def test_every_request_gets_its_own_tokens(world: Simulated, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        if rng.random() < 0.4:
            trouble(world, rng)
        world.scheduler.check()
        world.step()
    world.run()
    world.assert_answered()
    world.assert_empty()


def test_a_long_walk_meets_everything() -> None:
    world = Simulated.mixed(
        [(State(), 9, 1), (Full(), 60, 2), (Window(5), 20, 8)], Limits(14, 5, 0.05), host=20, state_every=5
    )
    rng = random.Random(3)
    hits = []
    for _ in range(examples(1200)):
        if rng.random() < 0.35:
            trouble(world, rng)
        plan = world.step()
        hits += [group.cached_tokens for group in plan.admitted if group.cached_tokens]
    world.run()
    world.assert_answered()
    world.assert_empty()
    state = world.pools[0]
    assert min(state.counts["hits"], state.counts["evictions"], state.counts["copies"]) > 20
    assert len(set(hits)) > 5
    counts = world.scheduler.counts
    assert min(counts["swapped_in"], counts["recomputed"], counts["finished"]) > 15
