"""The array of block tables holds the blocks of its tables after growth, moves and changes."""

from __future__ import annotations

import random

import pytest

from hf_paged.blocks import BlockPool, BlockTable, BlockTableArray


def test_the_array_follows_its_tables() -> None:
    """Rows in any order, longer than it was wide, behind windows, and in a row that another had."""
    chance, pool = random.Random(1), BlockPool(400, 2)
    array, tables = BlockTableArray(), [BlockTable(pool) for _ in range(11)]
    for row, table in enumerate(tables):
        table.append(chance.randrange(1, 9))
        array.put(row, table)
    for _ in range(300):
        row = chance.randrange(len(tables))
        table, end = tables[row], tables[row].end
        table.append(1)
        if chance.random() < 0.2:
            table.release_before(table.length - 4)
        array.put(row, table, end)
        assert all(array.matches(i, each) for i, each in enumerate(tables))
    assert array.width == 32
    tables[3].append(40)
    assert not array.matches(3, tables[3])
    array.put(3, tables[10])
    assert array.matches(3, tables[10])


@pytest.mark.parametrize("blocks", [16, 17])
def test_an_array_that_is_read_stays_as_it_is(blocks: int) -> None:
    pool = BlockPool(40, 1)
    array, table = BlockTableArray(), BlockTable(pool)
    table.append(3)
    array.put(0, table)
    kept = memoryview(array.ids)
    table.append(blocks - 3)
    array.put(0, table, 3)
    assert array.matches(0, table)
    assert (kept.obj is array.ids) == (blocks == 16)


def test_a_reader_of_the_journal_has_the_same_array() -> None:
    """Rows that others had before, also shorter ones with the same blocks: what is as before is left out, and the row
    counts as written all the same.
    """
    chance, pool = random.Random(2), BlockPool(300, 2)
    array, mirror = BlockTableArray(), BlockTableArray()
    array.journal = []
    tables = [BlockTable(pool) for _ in range(6)]
    entries = 0
    for _ in range(400):
        row = chance.randrange(len(tables))
        table = tables[row]
        if chance.random() < 0.1:
            table.free()
        table.append(chance.randrange(1, 5))
        if chance.random() < 0.2:
            table.crop(1)
        array.put(row, table)
        ((_, first, count),) = array.journal
        mirror.write(row, first, array.read(row, first, count))
        array.journal = []
        entries += count
        assert mirror.matches(row, table)
        assert array.rewritten(array.writes - 1) == mirror.rewritten(mirror.writes - 1) == [row]
    assert entries < 3 * 400
