"""Groups that wait on the host: gone and back as one, without a token computed twice, and never a dead engine
(C28 to C31, C34).
"""

from __future__ import annotations

import math
import random

import pytest
from simulated import Simulated

from hf_paged.scheduling import Request, SequenceGroup, Status, Victim


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return (first, *range(2, length + 1))


def sharing(group: SequenceGroup, kv_group: int, length: int) -> list[list[int]]:
    """Who of the group shares which block of the first `length` tokens with whom, here or on the host."""
    names: dict[int, int] = {}
    tables = [(sequence.parked or sequence.tables)[kv_group] for sequence in group.sequences]
    rows = [table.blocks[: length // table.pool.block_size - table.released] for table in tables]
    return [[names.setdefault(block, len(names)) for block in row] for row in rows]


def steps(world: Simulated, count: int) -> None:
    for _ in range(count):
        world.step()


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_a_group_is_swapped_as_one(window: int | None, beams: bool) -> None:
    """C30: every shared block once, the sharing survives, and nothing is computed again."""
    world = Simulated.of(total=60, size=2, window=window, tokens=32, host=40, prefix_caching=False)
    group = world.submit(Request(0, prompt(9), 24, width=3), beams=beams)
    steps(world, 6)
    computed, length = world.computed, group.leader.computed
    world.scheduler.preempt(group)
    assert group.swapped
    assert all(pool.held == 0 for pool in world.pools)
    before = [sharing(group, i, length) for i in range(len(world.pools))]
    distinct = [
        len({block for sequence in group.sequences for block in sequence.parked[i].blocks})
        for i in range(len(world.pools))
    ]
    assert [host.held for host in world.hosts if host] == distinct
    world.scheduler.check()
    plan = world.scheduler.schedule()
    assert [len(out) for out in plan.swaps.out] == [len(back) for back in plan.swaps.back] == distinct
    assert plan.admitted == (group,)
    assert [(row.start, row.count) for row in plan.rows] == [(length, 1)] * 3
    assert all(host.held == 0 for host in world.hosts if host)
    assert [sharing(group, i, length) for i in range(len(world.pools))] == before
    world.scheduler.abort(group)
    again = world.submit(Request(1, prompt(9), 24, width=3), beams=beams)
    steps(world, 6)
    world.scheduler.preempt(again)
    world.computed = computed
    world.run()
    assert again.preemptions == 1
    assert (
        world.computed == computed + sum(len(tokens) - 1 for tokens in world.answers[1].values()) - 3 * length
    )
    world.assert_answered()
    world.assert_empty()


def test_what_is_still_here_is_not_brought_back() -> None:
    """A block that the pool still has under its name is shared again; only the rest travels."""
    world = Simulated.of(total=20, size=4, tokens=32, host=20)
    group = world.submit(Request(0, prompt(14), 20))
    steps(world, 4)
    blocks = list(group.leader.tables[0].blocks)
    world.scheduler.preempt(group)
    assert world.pools[0].cached == 4
    plan = world.step()
    assert len(plan.swaps.out[0]) == len(blocks) == 5
    assert len(plan.swaps.back[0]) == 1
    assert group.leader.tables[0].blocks[:4] == blocks[:4]
    assert world.scheduler.counts["blocks_in"] == 1
    world.run()
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize("verify", [False, True])
def test_a_name_that_collides_is_not_what_is_still_here(verify: bool) -> None:
    """C25: with `verify` a block of other tokens under the same name is no block of the group's, and its own
    one travels.
    """
    world = Simulated.of(total=20, size=4, tokens=32, host=20, verify=verify)
    group = world.submit(Request(0, prompt(14), 20))
    steps(world, 4)
    pool, second = world.pools[0], group.leader.tables[0].blocks[1]
    world.scheduler.preempt(group)
    names = pool.names.of
    names[second] = names[second]._replace(tokens=(90, 91, 92, 93))  # another's, by an unlikely chance
    plan = world.scheduler.schedule()
    assert plan.admitted == (group,)
    assert len(plan.swaps.back[0]) == (2 if verify else 1)
    assert (second in group.leader.tables[0].blocks) is not verify


def test_what_comes_back_has_its_names_again() -> None:
    """Others took the room: the blocks come from the host, and are found by the next request when they are
    computed on.
    """
    world = Simulated.of(total=10, size=4, tokens=64, host=20)
    group = world.submit(Request(0, prompt(14), 24))
    steps(world, 3)
    world.scheduler.preempt(group)
    world.scheduler.preempted, kept = [], world.scheduler.preempted
    world.submit(Request(1, prompt(34, 5), 36))
    steps(world, 2)
    world.scheduler.preempted = kept
    world.step()
    assert world.scheduler.counts["blocks_in"] > 2
    world.run()
    assert world.scheduler.counts["recomputed"] == 0
    again = world.submit(Request(2, prompt(14), 20))
    world.run()
    assert again.cached_tokens == 12
    world.assert_answered()
    world.assert_empty()


def test_a_full_host_means_recomputation() -> None:
    """C31: all of a group or nothing of it."""
    world = Simulated.of(total=40, size=4, tokens=64, host=5, prefix_caching=False)
    groups = [world.submit(Request(i, prompt(14, i + 1), 20)) for i in range(3)]
    steps(world, 2)
    for group in reversed(groups):
        world.scheduler.preempt(group)
    assert [group.swapped for group in groups] == [False, False, True]
    assert world.hosts[0] is not None
    assert world.hosts[0].held == 4
    world.run()
    assert (world.scheduler.counts["swapped_in"], world.scheduler.counts["recomputed"]) == (1, 2)
    world.assert_answered()
    world.assert_empty()


def test_who_decides_knows_the_victim() -> None:
    """Blocks of every KV cache group, each once; tokens as often as they would be computed again."""
    asked: list[Victim] = []
    world = Simulated.of(
        total=60, size=2, window=5, tokens=32, host=40, swap=lambda victim: bool(asked.append(victim))
    )
    group = world.submit(Request(0, prompt(9), 24, width=3))
    steps(world, 4)
    world.scheduler.preempt(group)
    assert not group.swapped
    # 12 tokens each: 4 blocks are shared and 2 of each are its own, those that a window of 5 looks at.
    assert [(victim.blocks, victim.tokens) for victim in asked] == [((4 + 3 * 2, 3 * 2), 9 + 3 * 3)]
    world.run()
    world.assert_answered()


def test_no_group_is_swapped_by_default() -> None:
    world = Simulated.of(total=20, size=4, tokens=32, host=20, swap=lambda victim: 1 / 0)
    group = world.submit(Request(0, prompt(9), 12))
    world.step()
    world.scheduler.preempt(group, swap=False)
    assert not group.swapped
    world.run()
    world.assert_answered()


def test_a_prompt_in_the_middle_goes_on_where_it_was() -> None:
    """Chunks that were computed are not computed again; and a twin goes on waiting for the rest."""
    world = Simulated.of(total=40, size=4, tokens=8, sequences=6, host=20)
    first, twin = (world.submit(Request(i, prompt(30), 33, width=2)) for i in range(2))
    steps(world, 2)
    assert first.leader.computed == 16
    world.scheduler.preempt(first)
    plan = world.step()
    assert plan.admitted == (first,)
    assert twin.status is Status.WAITING
    assert [(row.start, row.count) for row in plan.rows] == [(16, 8)]
    world.run()
    assert twin.cached_tokens == 28
    assert world.computed == 30 + 2 + 2 * 2
    world.assert_answered()
    world.assert_empty()


def test_who_has_all_its_tokens_does_not_travel() -> None:
    """The host has only to hear of the last one: nothing of it is ever needed again."""
    world = Simulated.of(total=20, size=4, tokens=32, host=20)
    group = world.submit(Request(0, prompt(9), 10))
    plan = world.scheduler.schedule()
    world.scheduler.launch(plan)
    world.scheduler.preempt(group)
    assert not group.swapped
    assert not world.scheduler.schedule().swaps
    world.scheduler.confirm(plan)
    world.scheduler.extend([group.leader], [3])
    world.scheduler.finish(group.leader)
    world.assert_empty()


def test_no_new_group_before_those_on_the_host() -> None:
    """C28, C9: they come back first, without the watermark."""
    world = Simulated.of(total=8, size=4, tokens=64, watermark=0.25, prefix_caching=False, host=20)
    group = world.submit(Request(0, prompt(21), 24))
    world.step()
    world.scheduler.preempt(group)
    new = world.submit(Request(1, prompt(3, 5), 5))
    pool = world.pools[0]
    held = [pool.take() for _ in range(3)]
    assert not world.scheduler.schedule().admitted
    pool.drop(held.pop())
    assert world.scheduler.schedule().admitted == (group,)
    assert new.status is Status.WAITING
    for block in held:
        pool.drop(block)
    world.scheduler.abort(group)
    world.scheduler.abort(new)
    world.assert_empty()


def test_what_rests_on_forgotten_names_is_computed_again() -> None:
    """C24: other weights, and what waits on the host is worth nothing; nor is it swapped if it was forgotten
    before.
    """
    world = Simulated.of(total=40, size=4, tokens=32, host=40)
    first, second = (world.submit(Request(i, prompt(9, i + 1), 20, width=2)) for i in range(2))
    steps(world, 3)
    world.scheduler.preempt(first)
    world.pools[0].forget()
    world.salt = 1  # other weights: all that was computed with the old ones is wrong now
    world.scheduler.preempt(second)
    assert (first.swapped, second.swapped) == (True, False)
    for group in (first, second):  # what they have said was chosen by the old ones
        for sequence in group.sequences:
            del sequence.tokens[9:]
    world.run()
    assert world.scheduler.counts["recomputed"] == 2
    assert world.scheduler.counts["blocks_in"] == 0
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize("beams", [False, True])
def test_an_abort_on_the_host(beams: bool) -> None:
    """C34: host blocks are given back, before they were filled and afterwards; who gets them next gets his
    own.
    """
    world = Simulated.of(total=40, size=4, tokens=32, host=12)
    groups = [world.submit(Request(i, prompt(9, i + 1), 20, width=2), beams=beams) for i in range(3)]
    steps(world, 3)
    world.scheduler.preempt(groups[2])
    world.scheduler.abort(groups[2])
    assert world.hosts[0] is not None
    assert world.hosts[0].held == 0
    world.scheduler.preempt(groups[1])  # on the very blocks that the other was to have
    world.pools[0].forget()
    world.scheduler.preempted, kept = [], world.scheduler.preempted
    world.step()
    world.scheduler.preempted = kept
    assert world.hosts[0].held > 0
    world.scheduler.abort(groups[1])
    assert world.hosts[0].held == 0
    world.run()
    world.assert_answered()
    world.assert_empty()


def test_a_place_on_the_host_is_filled_by_its_last_owner() -> None:
    """Two victims before one plan, of whom the first is gone already: the second gets its own content
    back.
    """
    world = Simulated.of(total=40, size=4, tokens=32, host=4, prefix_caching=False)
    groups = [world.submit(Request(i, prompt(9, i + 1), 20)) for i in range(3)]
    steps(world, 3)
    for group in (groups[2], groups[1]):
        world.scheduler.preempt(group)
        assert group.swapped
        if group is groups[2]:
            world.scheduler.abort(group)
    plan = world.step()
    assert len(plan.swaps.out[0]) == len(plan.swaps.back[0]) == 3
    world.run()
    world.assert_answered()
    world.assert_empty()


def test_starting_over_empties_the_host() -> None:
    """A step that broke off in the middle may have broken a swap."""
    world = Simulated.of(total=40, size=4, tokens=32, host=20)
    groups = [world.submit(Request(i, prompt(9, i + 1), 20)) for i in range(3)]
    steps(world, 3)
    world.scheduler.preempt(groups[2])
    world.scheduler.schedule()
    world.scheduler.preempt(groups[1])
    world.scheduler.start_over(groups)
    world.scheduler.check()
    assert all(pool.held == 0 for pool in (*world.pools, *world.hosts) if pool)
    assert not world.scheduler.schedule().swaps
    world.scheduler.start_over(groups)
    world.run()
    world.assert_answered()
    world.assert_empty()


# ---- pressure


def under_pressure(share: int | None, **options: object) -> Simulated:
    """Forty requests, on a pool of a share of what they need, run to their ends."""
    world = Simulated.of(
        total=DEMAND // share if share else 4000, size=4, tokens=64, sequences=40, watermark=0.01, **options
    )
    world.checks = False
    rng = random.Random(5)
    for number in range(40):
        length = rng.randrange(8, 60)
        world.submit(
            Request(
                number, prompt(length, number + 1), length + rng.randrange(20, 90), rng.choice([1, 1, 1, 2])
            )
        )
    world.run()
    world.assert_answered()
    world.assert_empty()
    return world


DEMAND = 530
"""About the blocks that those requests hold at once if there are enough."""


def test_the_demand_is_what_it_is_said_to_be() -> None:
    world = under_pressure(None, prefix_caching=False)
    assert not world.scheduler.counts["preemptions"]
    assert 0.9 * DEMAND < world.pools[0].peak_held < 1.1 * DEMAND


@pytest.mark.parametrize("host", [None, 40, 2000])
def test_work_under_pressure_is_bounded(host: int | None) -> None:
    """C31: on a fifth of the demand swapped groups cost no token, and others not many; nobody goes again and
    again.
    """
    alone, world = (
        under_pressure(None, prefix_caching=False),
        under_pressure(5, prefix_caching=False, host=host),
    )
    counts = world.scheduler.counts
    assert counts["preemptions"] > 20
    assert counts["preemptions"] == counts["swapped_out"] + counts["recomputed"]
    assert counts["swapped_in"] == counts["swapped_out"]
    if host == 2000:
        assert world.computed == alone.computed
    else:
        assert alone.computed < world.computed < 1.5 * alone.computed
    longest = max(request.most_tokens for request in world.requests.values())
    assert max(group.setbacks for group in world.groups) <= 2 + math.log2(longest / 4)
