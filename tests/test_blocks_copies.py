"""Tables that go to another pool and come back (C30): sharing survives, every block travels once, names are
found again.
"""

from __future__ import annotations

import random

import pytest

from hf_paged.blocks import BlockPool, BlockTable, Copy, OutOfBlocks, append, commit, distinct, move, reorder


def filled(pool: BlockPool, tokens: int) -> BlockTable:
    table = BlockTable(pool)
    table.append(tokens)
    return table


def beams(pool: BlockPool, width: int, rng: random.Random) -> list[BlockTable]:
    """Tables of beams after some steps: they share in all kinds of ways."""
    first = filled(pool, rng.randrange(1, 12))
    tables = [first, *(first.fork() for _ in range(width - 1))]
    for _ in range(rng.randrange(10)):
        append(tables, [1] * width)
        tables = reorder(tables, [rng.randrange(width) for _ in range(width)])
    return tables


def pattern(tables: list[BlockTable]) -> list[list[int]]:
    """Who shares what with whom, whatever the blocks are called."""
    names: dict[int, int] = {}
    return [[names.setdefault(block, len(names)) for block in table.blocks] for table in tables]


@pytest.mark.parametrize("seed", range(20))
def test_sharing_survives_the_trip(seed: int) -> None:
    """There and back: equal patterns, equal counts, every shared block once, and what it holds is what it
    held.
    """
    rng = random.Random(seed)
    device, host = BlockPool(60, 2), BlockPool(60, 2)
    tables = beams(device, rng.randrange(1, 5), rng)
    content = {block: f"content {block}" for table in tables for block in table.blocks}
    before, lengths = pattern(tables), [table.length for table in tables]
    counts = sorted(device.references(block) for block in content)
    parked = [BlockTable(host) for _ in tables]
    out = move(tables, parked)
    assert len(out) == len(content) == host.held == distinct(parked)
    assert device.held == 0
    assert all(table.length == 0 for table in tables)
    on_host = {target: content[source] for source, target in out}
    assert sorted(host.references(block) for block in on_host) == counts
    others = [filled(device, 7) for _ in range(3)]  # somebody else takes the place
    back = move(parked, tables, {})
    assert host.held == 0
    here = {target: on_host[source] for source, target in back}
    assert sorted(here.values()) == sorted(content.values())
    assert not set(here) & {block for table in others for block in table.blocks}
    assert pattern(tables) == before
    assert [table.length for table in tables] == lengths
    for pool in (device, host):
        pool.check()


def test_what_is_there_under_its_name_is_shared() -> None:
    """Cached blocks are taken back before anything is evicted for the others; names reach as far as they are
    borne.
    """
    device, host = BlockPool(6, 2), BlockPool(6, 2)
    tokens = list(range(9))
    table = filled(device, 9)
    commit(table, tokens)
    blocks, names = list(table.blocks), list(table.digests)
    parked = [BlockTable(host)]
    move([table], parked)
    assert (device.cached, len(parked[0].digests)) == (4, 4)
    # As if the third one were not there any more.
    there = {parked[0].blocks[place]: blocks[place] for place in (0, 1, 3)}
    back = move(parked, [table], there)
    assert len(back) == 2
    assert [table.blocks[place] for place in (0, 1, 3)] == [blocks[place] for place in (0, 1, 3)]
    assert table.digests == names[:2]
    commit(table, tokens)  # what came back gets its name again
    assert table.digests == names
    assert [device.names.lookup(name) for name in names] == table.blocks[:4]
    device.check()
    host.check()


def test_a_block_that_others_hold_is_not_copied_back() -> None:
    device, host = BlockPool(4, 2), BlockPool(4, 2)
    table, other = filled(device, 4), None
    commit(table, [1, 2, 3, 4])
    other = table.fork()
    parked = [BlockTable(host)]
    move([table], parked)
    assert device.held == 2
    assert move(parked, [table], dict(zip(parked[0].blocks, other.blocks, strict=True))) == []
    assert table.blocks == other.blocks
    device.check()


def test_what_lies_behind_a_window_stays_behind() -> None:
    """C10: a table that has given back its first blocks goes without them."""
    device, host = BlockPool(9, 2), BlockPool(9, 2)
    table = filled(device, 9)
    table.release_before(6)
    parked = [BlockTable(host)]
    assert len(move([table], parked)) == 2
    assert (parked[0].released, parked[0].length) == (3, 9)
    move(parked, [table])
    assert (table.released, table.length, len(table.blocks)) == (3, 9, 2)
    device.check()
    host.check()


def test_without_room_nothing_changes() -> None:
    """Blocks that are there already and that nobody holds are no room for others."""
    device, host = BlockPool(4, 2), BlockPool(8, 2)
    table = filled(device, 8)
    commit(table, list(range(8)))
    blocks = list(table.blocks)
    parked = [BlockTable(host)]
    move([table], parked)
    holder = filled(device, 2)  # takes one of the four
    there = {
        image: block
        for image, block in zip(parked[0].blocks, blocks, strict=True)
        if block not in holder.blocks
    }
    assert len(there) == 3
    before = list(parked[0].blocks)
    with pytest.raises(OutOfBlocks, match="1 blocks are to move into a pool that has room for 0 of 4"):
        move(parked, [table], there)
    assert (parked[0].blocks, table.blocks, device.cached) == (before, [], 3)
    device.check()
    host.check()


def test_targets_are_empty() -> None:
    pool, host = BlockPool(4, 2), BlockPool(4, 2)
    one, other = filled(pool, 3), filled(host, 1)
    with pytest.raises(ValueError, match="as many empty ones"):
        move([one], [other])
    with pytest.raises(ValueError, match="as many empty ones"):
        move([one], [])
    assert move([], []) == []


def test_blocks_lie_side_by_side_on_the_host() -> None:
    """So they travel in few pieces."""
    device, host = BlockPool(20, 2), BlockPool(20, 2)
    rows = [filled(device, 2) for _ in range(4)]
    for _ in range(4):
        append(rows, [2] * 4)
    copies = move([rows[1], rows[3]], [BlockTable(host), BlockTable(host)])
    assert [copy.target for copy in copies] == list(range(10))
    assert isinstance(copies[0], Copy)
