"""The scheduler, with a model that is arithmetic: order, budgets, preemption, prefixes, groups."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cases import examples, pairwise
from scheduling_prompts import prompt
from simulated import Simulated

from hf_paged.blocks import BlockPool, Cross, Full
from hf_paged.scheduling import Infeasible, KVCacheGroup, Limits, Request, Scheduler, SequenceGroup, Status


def test_the_latest_arrival_goes_first() -> None:
    """C26, C28, C29: for want of blocks the newest is computed again; nobody new comes in until it runs."""
    world = Simulated.of(total=6, size=4, tokens=32, sequences=8, prefix_caching=False)
    first = world.submit(Request(0, prompt(7), 17))
    second = world.submit(Request(1, prompt(7, 5), 17))
    world.step()
    while not second.preemptions:
        world.step()
    assert first.preemptions == 0
    assert second.status is Status.PREEMPTED
    assert second.length > 7  # what it had said so far is part of its prompt now
    third = world.submit(Request(2, prompt(2, 6), 4))
    while second.status is Status.PREEMPTED:
        plan = world.step()
        assert third not in plan.admitted or second.status is Status.RUNNING
    world.run()
    world.assert_answered()
    world.assert_empty()


def test_later_ends_the_scan() -> None:
    """C12: a small request does not jump the queue for memory."""
    world = Simulated.of(total=6, size=4, tokens=64, prefix_caching=False)
    world.submit(Request(0, prompt(13), 14))
    large, small = world.submit(Request(1, prompt(12, 5), 14)), world.submit(Request(2, prompt(2, 6), 4))
    plan = world.step()
    assert [group.request.number for group in plan.admitted] == [0]
    assert large.status is small.status is Status.WAITING
    world.run()
    world.assert_answered()


def test_a_resumed_group_needs_no_watermark() -> None:
    """C9: whoever was preempted comes back into the last block."""
    world = Simulated.of(total=8, size=4, tokens=64, watermark=0.25, prefix_caching=False)
    group = world.submit(Request(0, prompt(21), 24))
    world.step()
    world.scheduler.preempt(group)
    blocker = world.scheduler.kv_groups[0].pool
    held = [blocker.take() for _ in range(2)]
    assert world.scheduler.schedule().admitted == (group,)
    for block in held:
        blocker.drop(block)
    world.scheduler.abort(group)
    world.assert_empty()


def test_a_group_that_returns_strands_no_other() -> None:
    """C9: a preempted group leaves the next block to each of those who run, or it would be the next to go
    again.
    """
    world = Simulated.of(total=8, size=4, tokens=64, prefix_caching=False)
    first = world.submit(Request(0, prompt(11), 20))
    second = world.submit(Request(1, prompt(19, 5), 24))
    world.step()
    world.scheduler.preempt(second)
    plan = world.step()
    assert not plan.admitted  # it needs 5 blocks, and 5 are left, one of which is the first one's next
    while second.status is Status.PREEMPTED:
        world.step()
    assert first.status is Status.FINISHED
    world.run()
    assert second.preemptions == 1
    world.assert_answered()


def test_what_runs_is_promised_its_tokens() -> None:
    """Tokens that a running group has still to compute are counted: nobody is let in on the blocks that it is
    going to take.
    """
    world = Simulated.of(total=14, size=4, tokens=64, prefix_caching=False)
    group = world.submit(Request(0, prompt(4), 20, width=3))
    while group.length < 12:
        world.step()
    world.scheduler.preempt(group)
    other = world.submit(Request(1, prompt(30, 5), 32))
    plan = world.step()
    assert plan.admitted == (
        group,
    )  # its common tokens leave room for the other's 8 blocks, its tails do not
    assert other.status is Status.WAITING
    world.run()
    assert world.scheduler.counts["preemptions"] == 1
    world.assert_answered()


def test_a_recomputation_leaves_the_others_their_tokens() -> None:
    """C27: an older group that is computed again is a prompt like any other, and takes what the decoding ones
    leave.
    """
    world = Simulated.of(total=40, tokens=4, sequences=4, prefix_caching=False)
    first = world.submit(Request(0, prompt(3), 24))
    for _ in range(12):
        world.step()
    world.scheduler.preempt(first)
    world.submit(Request(1, prompt(1, 5), 20))
    world.scheduler.preempted, kept = [], world.scheduler.preempted
    world.step()
    world.scheduler.preempted = kept
    plan = world.step()
    assert [(row.sequence.group.request.number, row.count) for row in plan.rows] == [(1, 1), (0, 3)]
    plan = world.step()
    assert [(row.sequence.group.request.number, row.count) for row in plan.rows] == [(1, 1), (0, 3)]
    world.run()
    world.assert_answered()


def test_a_prefix_is_computed_once() -> None:
    """C18, C19, C21: what a finished request computed is there for the next, but for the last token."""
    world = Simulated.of(total=20, size=4, tokens=32)
    world.submit(Request(0, prompt(12), 14))
    world.run()
    assert world.pools[0].cached == 4  # three full blocks, and the last one with one token in it
    world.computed = 0
    again = world.submit(Request(1, prompt(12), 14))
    world.run()
    assert again.cached_tokens == 11  # one token is always computed
    assert world.computed == 2
    world.assert_answered()


@pytest.mark.parametrize("size", [1, 4, 16, 256])
def test_a_prefix_is_found_to_the_token(size: int) -> None:
    """C17, C21: a prompt that shares 1,000 tokens with an earlier one computes the rest, whatever the block
    size.
    """
    world = Simulated.of(total=4096 // size, size=size, tokens=2048)
    shared = prompt(1000)
    world.submit(Request(0, (*shared, 7, 8, 9), 1020))
    world.run()
    groups = [world.submit(Request(1 + i, (*shared, 50 + i, 60), 1010)) for i in range(3)]
    world.run()
    assert [group.cached_tokens for group in groups] == [1000] * 3
    world.assert_answered()
    world.assert_empty()


def test_twins_in_flight_are_computed_once() -> None:
    """The second of two equal prompts waits for the first one's blocks, and nobody behind it waits for
    that.
    """
    world = Simulated.of(total=40, size=4, tokens=8, sequences=6)
    twins = [world.submit(Request(i, prompt(17), 20)) for i in range(3)]
    other = world.submit(Request(3, prompt(3, 6), 5))
    plan = world.step()
    assert twins[1].status is Status.WAITING
    assert [row.sequence.group for row in plan.rows] == [twins[0]]
    plan = world.step()
    plan = world.step()
    assert other in plan.admitted or other.status is not Status.WAITING
    world.run()
    assert [group.cached_tokens for group in twins] == [0, 16, 16]
    world.assert_answered()
    world.assert_empty()


def test_a_twin_goes_on_alone_if_the_first_is_gone() -> None:
    """C34: an abort breaks its promise."""
    world = Simulated.of(total=40, size=4, tokens=4, sequences=4)
    first, second = (world.submit(Request(i, prompt(17), 20)) for i in range(2))
    world.step()
    world.scheduler.abort(first)
    world.step()
    assert second.status is Status.RUNNING
    world.run()
    world.assert_answered()
    world.assert_empty()


def test_other_extras_are_no_hit() -> None:
    """C24: equal tokens under another salt are another content."""
    world = Simulated.of(total=20, size=4, tokens=32)
    world.submit(Request(0, prompt(12), 14))
    world.run()
    again = world.submit(Request(1, prompt(12), 14, extra=b"salt"))
    world.run()
    assert again.cached_tokens == 0


def test_a_failed_row_is_not_found() -> None:
    """C22: what a failed forward wrote is never named."""
    world = Simulated.of(total=20, size=4, tokens=32)
    world.fails = lambda group: group.request.number == 0
    world.submit(Request(0, prompt(12), 14))
    world.step()
    again = world.submit(Request(1, prompt(12), 14))
    world.run()
    assert again.cached_tokens == 0
    world.assert_answered()


@pytest.mark.parametrize("window", [1, 5, 8])
def test_behind_a_window_blocks_are_given_back(window: int) -> None:
    """C10: in the steady state a row holds at most ceil(W/B) + 1 blocks of that group."""
    world = Simulated.of(total=30, size=4, window=window, tokens=32)
    group = world.submit(Request(0, prompt(9), 60))
    world.step()
    while group.status is not Status.FINISHED:
        world.step()
        assert len(group.leader.tables[1].blocks) <= -(-window // 4) + 1
    world.assert_answered()


def test_priority_decides() -> None:
    """The higher priority is admitted first and preempted last, by arrival among equals."""
    world = Simulated.of(total=40, tokens=32, sequences=1, policy="priority")
    groups = [world.submit(Request(i, prompt(5, i + 1), 7, priority=p)) for i, p in enumerate((0, 2, 1, 2))]
    order = [group.request.number for plan in world.run() for group in plan.admitted]
    assert order == [1, 3, 2, 0]
    assert all(group.status is Status.FINISHED for group in groups)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_only_first_come_first_served_starves_none(policy: str) -> None:
    """C26: a request gets its turn behind those before it. By priority it waits as long as higher ones keep
    coming: no ageing.
    """
    world = Simulated.of(total=40, tokens=32, sequences=1, policy=policy)
    low = world.submit(Request(0, prompt(5), 7))
    for number in range(1, 12):
        world.submit(Request(number, prompt(5, number + 1), 7, priority=1))
        world.step()
    assert (low.status is Status.FINISHED) == (policy == "fcfs")
    assert (low.status is Status.WAITING) == (policy == "priority")
    world.run()
    assert low.status is Status.FINISHED
    world.assert_answered()


def test_abort_in_any_state() -> None:
    """C34: waiting, running, preempted, finished: everything is given back."""
    world = Simulated.of(total=20, size=4, tokens=32, sequences=2)
    groups = [world.submit(Request(i, prompt(6, i + 1), 12, width=2 if i == 1 else 1)) for i in range(4)]
    world.step()
    world.scheduler.preempt(groups[0])
    for group in (*groups, groups[0]):
        world.scheduler.abort(group)
        world.scheduler.check()
        assert group.status is Status.FINISHED
    world.assert_empty()


def test_the_impossible_is_refused_at_once() -> None:
    """C11: its neighbours never notice."""
    world = Simulated.of(total=4, size=4, tokens=32)
    world.submit(Request(0, prompt(6), 8))
    with pytest.raises(Infeasible, match="5 blocks of 4 tokens and 4 can be had"):
        world.submit(Request(1, prompt(6), 17))
    world.run()
    world.assert_answered()


def test_options_are_checked() -> None:
    world = Simulated.of(total=4)
    kv_group = world.scheduler.kv_groups[0]
    with pytest.raises(ValueError, match="policy='fifo'"):
        Scheduler([kv_group], Limits(4, 4), "fifo")
    with pytest.raises(ValueError, match="must be the last"):
        Scheduler([KVCacheGroup(Cross(), kv_group.pool), kv_group], Limits(4, 4))


def behind_encoders(total: int, encoders: int, size: int = 4, **options: Any) -> Simulated:
    limits = Limits(options.get("tokens", 16), options.get("sequences", 8), 0.0)
    more = {name: value for name, value in options.items() if name in ("host", "admission")}
    return Simulated([BlockPool(total, size)], [Full()], limits, encoders=BlockPool(encoders, size), **more)


def test_one_cross_table_a_group() -> None:
    """C36, C6: as long as the encoder's answer, with the first step, shared by all sequences, given back with
    the group.
    """
    world = behind_encoders(total=60, encoders=20)
    pool = world.encoders
    group = world.submit(Request(0, prompt(5), 16, width=3, source=10))
    assert pool.held == 0
    for _ in range(4):
        world.step()
        assert pool.held == 3
    assert {tuple(sequence.tables[-1].blocks) for sequence in group.sequences} == {
        tuple(group.leader.tables[-1].blocks)
    }
    assert all(pool.references(block) == 3 for block in group.leader.tables[-1].blocks)
    world.scheduler.preempt(group)
    assert pool.held == 0
    world.scheduler.check()
    world.run()
    world.assert_answered()
    world.assert_empty()


def test_cross_tables_need_room() -> None:
    """C11, C12: who finds none for what its encoder makes waits, though the other pool is empty; who never
    will is refused.
    """
    world = behind_encoders(total=200, encoders=6)
    first = world.submit(Request(0, prompt(3), 12, source=16))
    second = world.submit(Request(1, prompt(3, 5), 12, source=12))
    small = world.submit(Request(2, prompt(3, 6), 12, source=4))
    world.step()
    assert [group.status for group in (first, second, small)] == [
        Status.RUNNING,
        Status.WAITING,
        Status.WAITING,
    ]
    with pytest.raises(Infeasible, match="to 25 tokens needs 7 blocks of 4 tokens and 6 can be had"):
        world.submit(Request(3, prompt(3), 12, source=25))
    world.run()
    world.assert_answered()
    world.assert_empty()


def test_pictures_share_prefixes_by_content() -> None:
    """C18, C24: behind equal content equal tokens are found, and the cross-attention table is filled all the
    same; other content, none, or content that nobody names is never shared.
    """
    world = behind_encoders(total=60, encoders=40, tokens=64)
    for number, (key, hit) in enumerate([(b"a", 0), (b"a", 8), (b"b", 0), (b"", 0), (b"", 0), (b"b", 8)]):
        group = world.submit(Request(number, prompt(9), 13, source=10, source_key=key))
        world.run()
        assert group.cached_tokens == hit, number
    text = world.submit(Request(10, prompt(9), 13))
    world.run()
    assert text.cached_tokens == 0
    world.assert_answered()
    world.assert_empty()


def test_a_text_needs_no_room_for_pictures() -> None:
    """C9, C12: with the other pool full a text is let in, decodes in the batch and grows."""
    world = behind_encoders(total=60, encoders=3, admission="future", tokens=64)
    world.submit(Request(2, prompt(3), 16, width=3))
    world.run()  # some answers have ended early: later ones are estimated, with a margin
    world.submit(Request(0, prompt(3), 20, source=12, source_key=b"a"))
    world.step()
    assert world.encoders.available == 0
    text = world.submit(Request(1, prompt(5, 4), 20))
    plans = [world.step(), world.step()]
    world.scheduler.preempt(text)
    world.step()
    assert text.status is Status.RUNNING
    assert world.encoders.available == 0
    plans += world.run()
    assert any(plan.batch.sequences[: plan.batch.decodes] == (text.leader,) for plan in plans)
    assert world.scheduler.counts["preemptions"] == 1
    world.assert_answered()
    world.assert_empty()


def test_the_pool_of_cross_attention_is_the_last() -> None:
    pools = [BlockPool(8, 4), BlockPool(8, 4)]
    with pytest.raises(ValueError, match="must be the last one"):
        Scheduler([KVCacheGroup(Cross(), pools[0]), KVCacheGroup(Full(), pools[1])], Limits(16, 8))


@pytest.mark.parametrize(
    ("seed", "host", "admission"), pairwise(range(examples(3)), [None, 30], ["watermark", "future"])
)
def test_a_walk_of_texts_and_pictures(seed: int, host: int | None, admission: str) -> None:
    """C18, C23, C24, C30, C36: texts beside requests that attend to one of two pictures, on few blocks of both
    kinds, preempted and aborted.
    """
    rng = random.Random(seed)
    world = behind_encoders(total=22, encoders=24, tokens=9, sequences=6, host=host, admission=admission)
    alive: list[SequenceGroup] = []
    decodes = 0
    for number in range(80):
        width, length = rng.choice([1, 1, 2, 3]), rng.randrange(1, 14)
        source, key = rng.choice([(0, b""), (0, b""), (7, b"a"), (18, b"b"), (5, b"")])
        most = length + rng.randrange(6, 20)
        request = Request(
            number, prompt(length, rng.randrange(3)), most, width, source=source, source_key=key
        )
        alive.append(world.submit(request, beams=width > 1 and rng.random() < 0.5))
        for _ in range(rng.randrange(6)):
            decodes += world.step().batch.decodes
        if rng.random() < 0.15:
            world.scheduler.abort(alive.pop(rng.randrange(len(alive))))
        if rng.random() < 0.1 and world.scheduler.running:
            world.scheduler.preempt(world.scheduler.running[-1])
    world.run()
    world.assert_answered()
    world.assert_empty()
    assert decodes
    assert world.scheduler.counts["hits"] > 3
    assert world.scheduler.counts["preemptions"] > 3
    assert (world.scheduler.counts["swapped_out"] > 0) == (host is not None)


@pytest.mark.parametrize(
    ("seed", "host", "admission"), pairwise(range(examples(3)), [None, 30], ["watermark", "future"])
)
def test_a_walk_behind_encoders(seed: int, host: int | None, admission: str) -> None:
    """C23, C30, C36: random groups on few blocks of both kinds, preempted and aborted: everybody reads what
    his own encoder made.

    Cross tables are swapped with their groups, or made again.
    """
    rng = random.Random(seed)
    world = behind_encoders(total=22, encoders=24, tokens=9, sequences=6, host=host, admission=admission)
    alive: list[SequenceGroup] = []
    for number in range(60):
        width = rng.choice([1, 1, 2, 3])
        length = rng.randrange(1, 12)
        request = Request(
            number,
            prompt(length, rng.randrange(7)),
            length + rng.randrange(6, 20),
            width,
            source=rng.randrange(1, 20),
        )
        alive.append(world.submit(request, beams=width > 1 and rng.random() < 0.5))
        for _ in range(rng.randrange(6)):
            world.step()
        if rng.random() < 0.15:
            group = alive.pop(rng.randrange(len(alive)))
            world.scheduler.abort(group)
        if rng.random() < 0.1 and world.scheduler.running:
            world.scheduler.preempt(world.scheduler.running[-1])
    world.run()
    world.assert_answered()
    world.assert_empty()
    assert world.scheduler.counts["preemptions"] > 3
    assert (world.scheduler.counts["swapped_out"] > 0) == (host is not None)
