"""Whose cached blocks go, and whose stay (contract C43)."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.blocks import BlockPool, BlockTable, commit, move
from hf_paged.blocks.shares import Shares, TenantBooks, recount


def shares(total: int, used: dict[str, int], cached: dict[str, int], tenant: str, **weights: float) -> Shares:
    books = TenantBooks(weights)
    for each, count in used.items():
        books.change(each, count, count - cached.get(each, 0))
    return Shares(books, total, tenant)


def filled(pool: BlockPool, count: int, tenant: str) -> BlockTable:
    """A table of full blocks that nothing else has."""
    table = BlockTable(pool, tenant=tenant)
    table.append(count * pool.block_size)
    commit(table, [random.randrange(1 << 40) for _ in range(table.length)], keep_tokens=True)
    return table


def leave(pool: BlockPool, count: int, tenant: str) -> None:
    """Cached blocks of a tenant."""
    filled(pool, count, tenant).free()


# ---- the arithmetic


def test_tenants_with_blocks_divide_the_pool() -> None:
    assert shares(100, {"a": 10}, {"a": 10}, "a").of("a") == 100
    two = shares(100, {"a": 10}, {"a": 10}, "b")
    assert (two.of("a"), two.of("b")) == (50, 50)
    three = shares(100, {"a": 10, "b": 5}, {"a": 10}, "c", a=3.0)
    assert [three.of(each) for each in "abc"] == [60, 20, 20]


def test_others_keep_what_is_cached_within_their_shares() -> None:
    used = {"a": 70, "b": 30}
    assert shares(100, used, {"a": 70, "b": 30}, "a").reserved() == 30
    assert shares(100, used, {"a": 70, "b": 30}, "b").reserved() == 50, "what a may keep of 70"
    assert shares(100, used, {"a": 10, "b": 30}, "b").reserved() == 0, "a holds more than its share"
    assert shares(100, used, {"b": 10}, "a").reserved() == 10, "20 held and 10 cached"
    assert shares(100, {"a": 100}, {"a": 100}, "a").reserved() == 0


def test_the_loser_has_more_than_its_share_or_needs_the_block() -> None:
    assert shares(100, {"a": 70, "b": 30}, {"a": 1, "b": 30}, "b").loser() == "a"
    assert shares(100, {"a": 70, "b": 30}, {"b": 30}, "b").loser() == "b"
    assert shares(100, {"a": 60, "b": 40}, {"a": 1, "b": 40}, "a").loser() == "a"
    assert shares(100, {"a": 60, "b": 40}, {"b": 40}, "a").loser() == "b", "nothing else is cached"
    assert shares(100, {"a": 60, "b": 40}, {"a": 9, "b": 9}, "a", a=3.0).loser() == "b"


# ---- a pool


def test_a_flood_evicts_its_own_blocks() -> None:
    pool = BlockPool(100, 2)
    leave(pool, 50, "quiet")
    for _ in range(300):
        leave(pool, 7, "flood")
        assert pool.cached_by_tenant["quiet"] == 50
    pool.check()
    assert pool.cached_by_tenant == {"quiet": 50, "flood": 50}
    assert not +pool.taken


def test_blocks_that_are_not_full_count() -> None:
    """A block counts from when it is taken, with a name or without: here 60 blocks of prompts under way."""
    pool = BlockPool(100, 2)
    leave(pool, 40, "idle")
    under_way = BlockTable(pool, tenant="busy")
    under_way.append(2 * 55)
    assert not pool.shares("busy").over("idle")
    assert pool.shares("busy").over("busy")
    assert pool.available - pool.shares("busy").reserved() == 5
    assert pool.available - pool.shares("idle").reserved() == 45, "its own cached blocks, and the free ones"
    under_way.free()
    pool.check()
    assert pool.cached_by_tenant == {"idle": 40}


def test_one_tenant_alone_has_the_whole_pool() -> None:
    for tenant in ("", "a"):
        pool = BlockPool(60, 2)
        leave(pool, 60, tenant)
        table = filled(pool, 60, tenant)
        assert pool.held == 60
        table.free()
        assert not +pool.taken
        pool.check()


def test_hits_are_not_counted_twice() -> None:
    """C9: a cached block of another tenant that a request is going to hold is not one that it must leave."""
    pool = BlockPool(100, 2)
    table = filled(pool, 40, "a")
    blocks = list(table.blocks)
    table.free()
    leave(pool, 60, "b")
    assert pool.shares("b").reserved() == 40
    assert pool.shares("b", blocks[:30]).reserved() == 10


def test_copies_and_forks_belong_to_their_tenant() -> None:
    """C13, C14, C30: as do blocks that come back from another pool."""
    pool, host = BlockPool(20, 4), BlockPool(20, 4)
    table = BlockTable(pool, tenant="a")
    table.append(6)
    twin = table.fork()
    twin.append(1)
    assert Counter(pool.owners.values()) == {"a": 3}
    parked = [BlockTable(host), BlockTable(host)]
    move([table, twin], parked)
    pool.check()
    assert not pool.owners
    assert not host.owners
    move(parked, [table, twin])
    assert Counter(pool.owners.values()) == {"a": 3}
    table.free()
    twin.free()
    pool.check()
    assert not pool.owners


def test_forgetting_and_recovering_keep_the_tenants() -> None:
    pool = BlockPool(20, 4)
    leave(pool, 3, "a")
    table = filled(pool, 2, "b")
    pool.forget()
    assert Counter(pool.owners.values()) == {"b": 2}
    pool._references[table.blocks[0]] = 7
    pool.owners.clear()
    pool.recover()
    pool.check()
    assert Counter(pool.owners.values()) == {"b": 2}


@settings(max_examples=examples(50))
@given(
    seed=st.integers(0, 10**6),
    total=st.integers(6, 60),
    weights=st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 2.0, 3.0]), max_size=3),
)
def test_what_fits_beside_reserved_blocks_takes_none_of_them(
    seed: int, total: int, weights: dict[str, float]
) -> None:
    """A tenant that takes no more than is left to it evicts nothing within another's share, and the books add
    up. Beyond that it is counted.
    """
    rng = random.Random(seed)
    pool = BlockPool(total, 2)
    pool.weights.update(weights)
    tables: list[BlockTable] = []
    for _ in range(60):
        tenant = rng.choice(["", "a", "b", "c"])
        left = pool.available - pool.shares(tenant).reserved()
        assert 0 <= left <= pool.available
        before = pool.cached_by_tenant
        within = {each for each in before if each != tenant and not pool.shares(tenant).over(each)}
        taken = pool.taken.total()
        if tables and rng.random() < 0.45:
            tables.pop(rng.randrange(len(tables))).free()
        elif rng.random() < 0.9:
            tables.append(filled(pool, rng.randint(0, left), tenant))
            assert pool.taken.total() == taken
            assert all(pool.cached_by_tenant.get(each) == before[each] for each in within)
        elif left < pool.available:
            tables.append(filled(pool, pool.available, tenant))
            assert pool.taken.total() > taken
        pool.check()
    for table in tables:
        table.free()
    pool.check()
    assert pool.held == 0


@settings(max_examples=examples(50))
@given(
    seed=st.integers(0, 10**6),
    tenants=st.integers(1, 12),
    weights=st.dictionaries(
        st.sampled_from("abcdefghijkl"), st.sampled_from([0.01, 0.5, 2.0, 3.7, 40.0]), max_size=8
    ),
)
def test_running_totals_agree_with_a_recount(seed: int, tenants: int, weights: dict[str, float]) -> None:
    """Tenants come and go, and ask before they have blocks: reservations, with hits too, and victims, ties
    included, are the oracle's.
    """
    rng = random.Random(seed)
    names = "abcdefghijkl"[:tenants]
    every = dict.fromkeys(names, 1.0) | weights
    books = TenantBooks(weights)
    used: Counter[str] = Counter()
    cached: dict[str, int] = {}
    total = rng.choice([20, 60, 500])
    for _ in range(250):
        tenant = rng.choice(names)
        most = rng.choice([1, 3, 20])
        have = cached.get(tenant, 0)
        kind = rng.choice(["take", "take", "cache", "hold", "drop", "evict", "evict"])
        if kind == "take" and used.total() < total:
            count = rng.randint(1, min(most, total - used.total()))
            books.change(tenant, count, count)
            used[tenant] += count
        elif kind == "drop" and used[tenant] > have:
            count = rng.randint(1, min(most, used[tenant] - have))
            books.change(tenant, -count, -count)
            used[tenant] -= count
        elif kind == "cache" and used[tenant] > have:
            count = rng.randint(1, min(most, used[tenant] - have))
            books.change(tenant, 0, -count)
            cached[tenant] = have + count
        elif kind in ("hold", "evict") and have:
            count = rng.randint(1, min(most, have))
            books.change(tenant, -count * (kind == "evict"), count * (kind == "hold"))
            cached[tenant] -= count
            used[tenant] -= count * (kind == "evict")
        used = +used
        cached = {each: count for each, count in cached.items() if count}
        for needs in rng.sample(names, min(tenants, 2)):
            reserved, loser = recount(total, used, cached, every, needs)
            made = Shares(books, total, needs)
            assert made.reserved() == reserved
            assert not cached or made.loser() == loser
            hits = {each: rng.randint(0, count) for each, count in cached.items()}
            left = {each: count - hits[each] for each, count in cached.items()}
            made = Shares(books, total, needs, Counter(hits).elements())
            assert made.reserved() == recount(total, used, left, every, needs)[0]


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_the_cost_of_a_block_does_not_grow_with_the_tenants() -> None:
    """Of a full pool, and of what is reserved for others, which admission and every step ask for."""
    costs = []
    for tenants in (3, 300):
        pool = BlockPool(600, 2)
        for number in range(tenants):
            leave(pool, 600 // tenants, f"tenant-{number}")
        table = BlockTable(pool, tenant="tenant-1")
        table.append(2)  # what each tenant left is in order now
        assert pool.free == 0
        costs.append(
            [
                lines_run(lambda table=table: table.append(2)),
                lines_run(lambda pool=pool: pool.shares("tenant-1").reserved()),
                lines_run(lambda pool=pool: pool.shares("another").reserved()),
            ]
        )
        table.free()
        pool.check()
    few, many = costs
    assert all(more <= less + 10 for less, more in zip(few, many, strict=True)), costs


def test_the_audit_finds_totals_that_are_wrong() -> None:
    pool = BlockPool(20, 2)
    leave(pool, 4, "a")
    table = filled(pool, 3, "b")
    pool.check()
    pool.owners[table.blocks[0]] = "a"
    with pytest.raises(AssertionError, match="counted for tenants"):
        pool.check()
    pool.recover()
    pool.check()
    table.free()
    pool.check()


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_agrees_with_the_plainest_model(seed: int) -> None:
    """Of several tenants the one with the most blocks for its weight loses, if that is more than its share;
    counted anew from lists each time.
    """
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": 2.5, "c": 0.5}
    for _ in range(3000):
        used = {each: rng.randrange(1, 40) for each in rng.sample("abcd", rng.randint(1, 4))}
        cached = {each: rng.randint(0, count) for each, count in used.items()}
        cached = {each: count for each, count in cached.items() if count}
        tenant = rng.choice("abcd")
        if not cached:
            continue
        total = sum(used.values())
        made = shares(total, used, cached, tenant, **weights)
        present = {*used, tenant}
        share = {
            each: total * weights.get(each, 1.0) / sum(weights.get(t, 1.0) for t in present)
            for each in present
        }
        over = [each for each in cached if used[each] + (each == tenant) > max(1, int(share[each] + 1e-6))]
        loser = made.loser()
        if over:
            assert loser in over
        else:
            assert loser == tenant or tenant not in cached
        reserved = sum(
            min(count, max(0, max(1, int(share[each] + 1e-6)) - used[each] + count))
            for each, count in cached.items()
            if each != tenant
        )
        assert made.reserved() == reserved
