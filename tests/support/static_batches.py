"""Shared by the tests of captured steps' index tensors: batches that count their uploads, and rows to load."""

from __future__ import annotations

from array import array

import torch

from hf_paged.blocks import BlockTable, BlockTableArray, Full, SharedReads, Window
from hf_paged.kv import (
    Batch,
    LayerGroup,
    Layout,
    Memory,
    Ops,
    Pages,
    Rows,
    Sequences,
    StaticBatch,
    reference,
)  # fmt: skip
from hf_paged.kv.config import CacheConfig

CPU = torch.device("cpu")


LAYOUT = Layout(CPU, torch.float32, 1, 1, 1)


MOST_COLUMNS = 60


GARBAGE = -5.0
"""The value that rows that are not there would write."""


class Static(StaticBatch):
    """One that counts its uploads."""

    uploads = 0
    user: object = None
    """Whose step it was loaded with, for tests that keep books of their own."""

    def load(self, *step: object) -> None:
        self.uploads += 1
        super().load(*step)  # type: ignore[arg-type]


def static_batch(
    rows: int, new: int, block_size: int, columns: int = 1, shared: SharedReads | None = None
) -> Static:
    width = -(-(MOST_COLUMNS + 8) // block_size)
    return Static(rows, new, width, block_size, columns, CPU, shared=shared)


def make_group(window: int | None = None, **options: int) -> LayerGroup:
    kind = Full() if window is None else Window(window)
    group = Memory().group(kind, CacheConfig(**options), 1, 1.0)
    group.place(0, LAYOUT)
    return group


def sequences(group: LayerGroup, expected: int = 0, keep_past: bool = False) -> Sequences:
    made = Sequences(group.memory, {group.kind: group})
    made.expect(expected)
    if keep_past:
        made.keep_past()
    return made


def rows_of(cache: Sequences) -> Rows:
    (rows,) = cache.rows.values()
    return rows


def write(group: LayerGroup, batch: Batch | StaticBatch, numbers: torch.Tensor) -> Pages:
    """Store numbers [rows, new], as keys and, negative, as values; rows beyond them write garbage, if they
    write.
    """
    store, index = group.store(0)
    pages = Pages(*store.of_layer[index], batch, Ops())
    tokens = torch.full((batch.rows, 1, batch.new, 1), GARBAGE)
    tokens[: len(numbers), 0, :, 0] = numbers
    pages.ops.write(pages, tokens, -tokens)
    return pages


def contents(pages: Pages, window: int | None) -> list[list[list[float]]]:
    """For each row and new token the numbers that it sees, in order."""
    batch = pages.batch
    first = batch.first_visible(window)
    keys, values = (reference.gather(data, batch, first)[:, 0, :, 0] for data in (pages.keys, pages.values))
    visible = batch.visible(first, window, CPU)
    visible = torch.ones(1, dtype=torch.bool) if visible is None else visible
    visible = visible.expand(batch.rows, 1, batch.new, keys.shape[1])[:, 0]
    seen = [[keys[row][mask].tolist() for mask in visible[row]] for row in range(batch.rows)]
    assert seen == [[(-values[row][mask]).tolist() for mask in visible[row]] for row in range(batch.rows)]
    return seen


def step(group: LayerGroup, cache: Sequences, static: StaticBatch) -> None:
    rows_of(cache).advance(static.new, static)
    static.begin(group.captured_ops.advance)
    write(group, static, torch.ones(cache.count, static.new))


def rows_in_array(
    tables: list[BlockTable], counts: list[int], row_ids: list[int] | None = None
) -> tuple[BlockTableArray, array[int], array[int], array[int]]:
    """The columns of a step in which table i, in its row of the array, has taken counts[i] tokens."""
    row_ids = list(range(len(tables))) if row_ids is None else row_ids
    inside = BlockTableArray()
    for row, table in zip(row_ids, tables, strict=True):
        inside.put(row, table)
    starts = [table.length - count for table, count in zip(tables, counts, strict=True)]
    return inside, array("i", row_ids), array("i", starts), array("i", counts)
