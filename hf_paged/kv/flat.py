"""One step of many sequences in one row of tokens: where each one's tokens are written and read."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from ..blocks import TableView
from .batch import PLANS, RowBatch, Singles, Span, StridedView
from .upload import upload


class FlatBatch(RowBatch):
    """Several sequences in one row: sequence i brings counts[i] new tokens, the last ones of its table, one
    sequence after the other.

    A model sees one row of `new` tokens; only attention separates the sequences. The maker of the batch keeps
    the tables unchanged until the step is over.
    """

    packed = True

    def __init__(
        self,
        tables: Sequence[TableView],
        counts: Sequence[int],
        plans: dict[object, Any] | None = None,
        groups: Callable[[], array[int]] | None = None,
    ) -> None:
        """plans: of kernels, kept from step to step. groups: of sequences of one token that read common
        blocks together.
        """
        columns = max(table.length for table in tables)
        kept = {} if plans is None else {PLANS: plans}
        strided = _strided_view_of(tables)
        super().__init__(tables, None, columns, sum(counts), strided, lambda: True, kept, groups=groups)
        self.rows = 1  # as the model sees it
        self.fresh = False  # several sequences are never one sequence
        self.longest = 1 if self.new == len(tables) else max(counts)
        self.plain = self.new == 1
        if self.plain and self.strided is None:
            self.new_strided = StridedView(_last_slot(tables[0]) - columns + 1, 0)
        self.counts = list(counts)
        self.borders = [0, *accumulate(counts)]
        """Sequence i's new tokens are those from borders[i] to borders[i + 1]."""
        self._parts: dict[tuple[torch.device, int | None], tuple[Singles | None, list[Span]]] = {}
        self._borders: dict[torch.device, torch.Tensor] = {}

    def written(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        if device not in self._written:
            slots: list[int] = []
            for table, count in zip(self.tables, self.counts, strict=True):
                slots += [_last_slot(table)] if count == 1 else _slots(table, table.length - count)
            self._written[device] = upload(slots, device), None
        return self._written[device]

    def borders_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._borders:
            self._borders[device] = upload(self.borders, device, torch.int32)
        return self._borders[device]

    def parts(self, window: int | None, device: torch.device) -> tuple[Singles | None, list[Span]]:
        """All layers of a step share them."""
        if (device, window) not in self._parts:
            single = [i for i, count in enumerate(self.counts) if count == 1]
            longer = [i for i, count in enumerate(self.counts) if count > 1]
            self._parts[device, window] = (
                self._singles(single, window, device) if single else None,
                [self._span(i, window, device) for i in longer],
            )
        return self._parts[device, window]

    def _singles(self, rows: list[int], window: int | None, device: torch.device) -> Singles:
        size = self.block_size
        tables = [self.tables[i] for i in rows]
        begins = [0 if window is None else max(0, table.length - window) for table in tables]
        starts = [begin // size for begin in begins]
        held = [table.blocks[start - table.released :] for table, start in zip(tables, starts, strict=True)]
        places = None if len(rows) == len(self.tables) else upload([self.borders[i] for i in rows], device)
        width = max(map(len, held))
        blocks = upload([row + row[-1:] * (width - len(row)) for row in held], device)
        # Of every row where it begins and ends, counted from its first block's first slot, and the slot of
        # its last token.
        edges = [
            (begin - start * size, table.length - start * size, _last_slot(table))
            for table, begin, start in zip(tables, begins, starts, strict=True)
        ]
        begin, end, last = upload(edges, device).unbind(1)
        at = torch.arange(width * size, device=device)
        seen = at < end[:, None]
        if window is not None:
            seen &= at >= begin[:, None]
        slots = (blocks[:, :, None] * size + at[:size]).flatten(1)
        slots = torch.where(seen, slots, last[:, None])
        return Singles(places, slots.flatten(), seen[:, None, None])

    def _span(self, row: int, window: int | None, device: torch.device) -> Span:
        table = self.tables[row]
        count = self.counts[row]
        begin = self.borders[row]
        end = self.borders[row + 1]
        first = 0 if window is None else max(0, table.length - count - window + 1)
        narrow = window is not None and count > window
        slots = None if count == table.length else upload(_slots(table, first), device)
        if slots is None and not narrow:
            return Span(begin, end, None, None)
        at = torch.arange(table.length - count, table.length, device=device)[:, None]
        column = torch.arange(first, table.length, device=device)
        mask = column <= at
        if window is not None:
            mask = mask & (column > at - window)
        return Span(begin, end, slots, mask[None, None])


def _strided_view_of(tables: Sequence[TableView]) -> StridedView | None:
    """Where the tokens lie of a sequence that is alone and whose blocks follow each other in the pool."""
    blocks = tables[0].blocks
    if len(tables) > 1 or not blocks or blocks != list(range(blocks[0], blocks[0] + len(blocks))):
        return None
    return StridedView((blocks[0] - tables[0].released) * tables[0].pool.block_size, 0)


def _last_slot(table: TableView) -> int:
    """The slot of a table's last token."""
    size = table.pool.block_size
    return table.blocks[-1] * size + (table.length - 1) % size


def _slots(table: TableView, first: int) -> list[int]:
    """The slots of a table's tokens from position `first` on."""
    size = table.pool.block_size
    place = first // size - table.released
    slots = [slot for block in table.blocks[place:] for slot in range(block * size, block * size + size)]
    begin = first % size
    return slots[begin : begin + table.length - first]
