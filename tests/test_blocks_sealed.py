"""The books of blocks whose bytes are final: what is sealed, what ends a seal, and what is due for a check."""

from __future__ import annotations

import pytest

from hf_paged.blocks import BlockPool, BlockTable, Due, Prompt, SealedBlocks, adopt, commit, move
from hf_paged.blocks.prefix_lookup import PrefixLookup, detach

PROMPT = list(range(1, 11))


def sealed_pool(total: int = 6) -> tuple[BlockPool, SealedBlocks]:
    pool = BlockPool(total, 4)
    pool.sealed = SealedBlocks()
    return pool, pool.sealed


def sum_all(sealed: SealedBlocks) -> tuple[int, ...]:
    """Take the checksums of all fresh blocks."""
    fresh = sealed.take_fresh()
    sealed.sum(fresh)
    return fresh


def test_full_blocks_and_named_ones_are_sealed_once() -> None:
    pool, sealed = sealed_pool()
    table = BlockTable(pool)
    table.append(10)
    table.seal(7)
    assert sum_all(sealed) == (0,)
    table.seal(10)
    assert sum_all(sealed) == (1,)
    commit(table, PROMPT)
    assert sum_all(sealed) == ()
    assert 0 in sealed
    assert 2 not in sealed
    pool.check()


def test_what_changes_a_block_or_gives_it_up_ends_its_seal() -> None:
    pool, sealed = sealed_pool()
    table = BlockTable(pool)
    table.append(12)
    table.seal(12)
    sum_all(sealed)
    table.crop(2)
    table.append(1)  # is written in the block that was full
    assert [block in sealed for block in range(3)] == [True, True, False]
    table.free()
    assert [block in sealed for block in range(3)] == [False] * 3
    pool.check()


def test_forks_hits_copies_and_evictions_are_due() -> None:
    pool, sealed = sealed_pool()
    table = BlockTable(pool)
    table.append(10)
    commit(table, PROMPT, keep_tokens=True)
    table.fork().free()
    assert not sealed.is_due  # no checksum was taken yet
    sum_all(sealed)
    twin = table.fork()
    assert sealed.take_due() == (Due(0, "shared"), Due(1, "shared"))
    twin.free()
    table.free()
    other = BlockTable(pool)
    adopt(other, PrefixLookup(pool, Prompt([*PROMPT[:7], 9], 4)).take(7))
    detach([other])
    assert sealed.take_due() == (Due(0, "shared"), Due(1, "shared"), Due(1, "copied", other.blocks[-1]))
    large = BlockTable(pool)
    large.append(16)
    assert sealed.take_due() == (Due(1, "evicted"),)
    pool.check()


def test_blocks_that_go_to_the_host_are_due() -> None:
    pool, sealed = sealed_pool()
    table = BlockTable(pool)
    table.append(8)
    table.seal(8)
    sum_all(sealed)
    move([table], [BlockTable(BlockPool(5, 4))])
    assert sealed.take_due() == (Due(0, "swapped out", 0), Due(1, "swapped out", 1))
    pool.check()


def test_a_cached_block_with_a_wrong_content_is_free() -> None:
    pool, _ = sealed_pool()
    table = BlockTable(pool)
    table.append(8)
    commit(table, PROMPT)
    table.free()
    pool.discard(0)
    assert (pool.cached, pool.free) == (1, 5)
    assert PrefixLookup(pool, Prompt(PROMPT, 4)).reach(8) == 0
    pool.check()


def test_a_free_block_that_is_sealed_is_an_error() -> None:
    pool, sealed = sealed_pool()
    sealed.seal(3)
    with pytest.raises(AssertionError, match="block 3 is free and sealed"):
        pool.check()
