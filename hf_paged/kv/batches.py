"""The batches of running rows: where the layers of one group write and read a step's tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import partial
from operator import add
from typing import Any

import torch

from ..blocks import BlockTableArray, TableView
from ..blocks.shared_reads import SharedReads
from .batch import RowBatch
from .flat import FlatBatch
from .group import LayerGroup
from .ops_torch import Ops
from .spans import StaticSpans
from .static import StaticBatch

MOST_PLANS = 256
"""Plans of kernels that are kept."""
ENDLESS = 2**30
"""Tokens of a block that is never full, where numbers have 32 bits."""


class GroupBatches:
    """Makes the batches of one group's layers, and keeps from step to step what they need: plans of kernels
    for a number of batch sizes, and the books of rows that read common blocks together.

    Where tables are given, row row_ids[i] has taken counts[i] tokens after starts[i].
    """

    def __init__(self, group: LayerGroup, captured: bool = False, latent: bool = False) -> None:
        """captured: the steps are; else they are launched one operation at a time. latent: attention reads
        latents, by plain torch and of each row by itself.
        """
        self.group = group
        size, option = group.pool.block_size, "off" if latent else group.config.shared_reads
        self.shared = SharedReads.of(group.kind, size, option, on_cpu=not captured)
        """The books of rows that read common blocks together, if these layers' rows may."""
        self._plans: dict[object, Any] = {}

    def static(
        self,
        rows: int,
        width: int,
        *,
        new: int = 1,
        most: int | None = None,
        columns: int | None = None,
        device: torch.device | None = None,
        ops: Ops | None = None,
    ) -> StaticBatch:
        """Static tensors for captured steps of `rows` rows of `new` tokens with tables of `width` blocks, or
        of `rows` tokens of `most` sequences. device, ops: where they are not yet the group's. columns: as in
        `StaticBatch`.
        """
        group, kind = self.group, self.group.kind
        size = group.pool.block_size
        if not kind.fills:  # a sequence has one slot
            width, size = 1, ENDLESS
        columns = width if columns is None else columns
        device = group.device if device is None else device
        kernels = (group.captured_ops if ops is None else ops).kernels
        shared = self.shared if new == 1 and rows > 1 and kernels is not None else None
        if most is not None:
            return StaticSpans(rows, most, width, size, columns, device, kind.window, shared)
        return StaticBatch(rows, new, width, size, columns, device, kind.window, shared)

    def flat(
        self, tables: BlockTableArray, row_ids: array[int], starts: array[int], counts: array[int]
    ) -> FlatBatch:
        """All rows side by side, as one row of tokens."""
        if len(self._plans) > MOST_PLANS:
            self._plans.clear()
        views = self._views(tables, row_ids, starts, map(add, starts, counts))
        return FlatBatch(views, counts, self._plans, self._groups(tables, row_ids, starts, counts))

    def alone(
        self, tables: BlockTableArray, row_ids: array[int], starts: array[int], length: int, new: int
    ) -> RowBatch:
        """One row by itself, whose table has `length` tokens, the last `new` of them of this step."""
        views = self._views(tables, row_ids, starts, [length])
        return RowBatch(views, None, length, new, None, lambda: True)

    def beside(
        self, tables: BlockTableArray, row_ids: array[int], starts: array[int], counts: array[int]
    ) -> RowBatch:
        """Rows of one token each beside each other, which end in one column."""
        views = self._views(tables, row_ids, starts, map(add, starts, counts))
        columns = max(starts) + 1
        begins = [columns - 1 - start for start in starts]
        groups = self._groups(tables, row_ids, starts, counts)
        return RowBatch(views, begins if any(begins) else None, columns, 1, None, lambda: True, groups=groups)

    def _views(
        self, tables: BlockTableArray, row_ids: array[int], starts: array[int], lengths: Iterable[int]
    ) -> list[TableView]:
        """The tables of rows as far as their tokens read them. lengths: the tokens of each table."""
        kind, pool = self.group.kind, self.group.pool
        found = []
        for row_id, start, length in zip(row_ids, starts, lengths, strict=True):
            released = kind.reach(start, pool.block_size)
            blocks = tables.read(row_id, released, pool.blocks_for(length) - released)
            found.append(TableView(pool, blocks.tolist(), length, released))
        return found

    def _groups(
        self, tables: BlockTableArray, row_ids: array[int], starts: array[int], counts: array[int]
    ) -> Callable[[], array[int]] | None:
        """The groups of rows that read common blocks together, for a reader that asks for them."""
        if self.shared is None or len(row_ids) < 2:
            return None
        return partial(self.shared.follow_singles, tables, row_ids, starts, counts)
