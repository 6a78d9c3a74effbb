"""The rows of a cache in all groups: delayed forks and reorders are settled before anything reads the rows (C16)."""

from __future__ import annotations

import torch

from hf_paged.blocks import Full, LayerKind, Window
from hf_paged.kv import Layout, Memory, Sequences
from hf_paged.kv.config import CacheConfig

FULL, WINDOW = Full(), Window(4)


def sequences(rows: int, columns: int) -> Sequences:
    """Rows of so many columns, in layers that see all and in layers that see a window."""
    memory = Memory()
    config = CacheConfig(block_size=2)
    kinds: tuple[LayerKind, ...] = (FULL, WINDOW)
    groups = {kind: memory.group(kind, config, 1, 0.5) for kind in kinds}
    for group in groups.values():
        group.place(0, Layout(torch.device("cpu"), torch.float32, 1, 2, 2))
    made = Sequences(memory, groups)
    step(made, rows, columns)
    return made


def step(of: Sequences, rows: int, columns: int) -> None:
    for kind in of.rows:
        of.extend(kind, rows, columns)


def blocks(of: Sequences, kind: LayerKind = FULL) -> list[list[int]]:
    return [list(table.blocks) for table in of.tables(kind)]


def free(of: Sequences) -> None:
    """Nothing is held afterwards."""
    of.free()
    assert of.memory.held == 0
    of.memory.check()


def test_a_row_stands_for_others_until_they_are_held() -> None:
    made = sequences(2, 3)
    before = blocks(made)
    made.sources = [0, 0, 1]
    assert made.count == 2
    assert made.hold(range(3), None) == [0, 0, 1]
    assert made.count == 3
    assert blocks(made) == [before[0], before[0], before[1]]
    assert made.sources is None
    made.memory.check()
    step(made, 3, 1)
    first, second, _ = blocks(made)
    assert first[0] == second[0]
    assert first[1] != second[1], "a shared last block is copied before it is written"
    free(made)


def test_rows_that_nobody_computes_are_given_back() -> None:
    """Row 2 runs on and stands for all; held again, the others are forks of it."""
    made = sequences(3, 5)
    before = blocks(made)
    assert made.hold([0, 2], [0, 1, 1]) == [0, 2]
    assert made.hold([2], [0, 0, 0]) == [1]
    assert blocks(made) == [before[2]]
    assert {rows.group.pool.held for rows in made.rows.values()} == {len(before[2])}
    assert made.hold(range(3), None) == [0, 0, 0]
    assert blocks(made) == [before[2]] * 3
    free(made)


def test_a_reorder_is_the_same_in_all_groups() -> None:
    made = sequences(3, 5)
    before = {kind: blocks(made, kind) for kind in made.rows}
    made.reorder(torch.tensor([2, 0, 0]))
    for kind, rows in before.items():
        assert blocks(made, kind) == [rows[2], rows[0], rows[0]]
    free(made)


def test_a_fork_is_a_cache_of_its_own() -> None:
    """Over the same blocks: what one of them appends or drops is not the other's."""
    made = sequences(2, 4)
    twin = made.fork()
    before = blocks(made)
    assert blocks(twin) == before
    step(twin, 2, 3)
    made.crop(0)
    assert blocks(made) == before
    assert (made.columns, twin.columns) == (4, 7)
    made.free()
    assert twin.memory.held > 0
    free(twin)


def test_the_past_is_kept_until_a_crop() -> None:
    made = sequences(1, 3)
    made.keep_past()
    step(made, 1, 6)
    made.crop(5)
    assert set(made.positions.values()) == {4}
    free(made)
