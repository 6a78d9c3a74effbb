"""One step of one cache as index tensors: where to write, where to read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..blocks import BlockTable
from .upload import upload

WIDTHS = 16
"""Tables are as wide as some multiple of this: for Triton such numbers are one kind, so a kernel is compiled
once for all of them.
"""


PLANS = "native"
"""Where a workspace keeps the plans of the C++ op."""


class StridedView(NamedTuple):
    """Rows at equal distances: token t of row i is in slot first + i * stride + t: one strided view."""

    first: int
    stride: int

    def view(self, data: torch.Tensor, rows: int, first: int, end: int) -> torch.Tensor:
        """Columns from `first` to `end` of data [..., slots, heads, dim], as [..., rows, heads, end - first,
        dim].
        """
        *outer, heads, dim = data.shape
        token = heads * dim
        shape = (*outer[:-1], rows, heads, end - first, dim)
        strides = (*data.stride()[: len(outer) - 1], self.stride * token, dim, token, 1)
        return data.as_strided(shape, strides, data.storage_offset() + (self.first + first) * token)


class Batch:
    """Where the tokens of every row lie, after the step that made it.

    Columns count as transformers does, left padding included: row i begins at column starts[i], and column c
    of it is token c - starts[i] of its table. The batch reads tables that others may change later; it refuses
    to answer then.
    """

    def __init__(
        self,
        tables: list[BlockTable],
        starts: list[int] | None,
        columns: int,
        new: int,
        strided: StridedView | None,
        is_current: Callable[[], bool],
        workspace: dict[str, Any] | None = None,
    ) -> None:
        self.tables = tables
        self.starts = starts
        self.columns = columns
        self.new = new
        self.strided = strided
        self.new_strided = strided
        """Where the new tokens lie, if at equal distances."""
        self.rows = len(tables)
        """The rows of keys and values that a model hands to its cache."""
        self.fresh = new == columns
        """Whether this step's tokens are all there is."""
        self._is_current = is_current
        self.workspace: dict[str, Any] = {} if workspace is None else workspace
        """What outlives a step: plans of kernels, and the device's copy of the tables until a block changes.
        """
        self._written: dict[torch.device, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._blocks: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._slots: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._lengths: dict[torch.device, torch.Tensor] = {}
        self._visible: dict[tuple[torch.device, int, int | None], torch.Tensor | None] = {}

    @property
    def block_size(self) -> int:
        return self.tables[0].pool.block_size

    @property
    def step(self) -> object:
        """What a kernel's plan is made for."""
        return self

    @property
    def empty(self) -> bool:
        """Whether nothing but padding was seen so far, so that no slot holds anything."""
        return not any(table.length for table in self.tables)

    def first_visible(self, window: int | None) -> int:
        """The first column that any of the new tokens may attend to."""
        return 0 if window is None else max(0, self.columns - (window - 1 + self.new))

    def check(self) -> None:
        """Raise if the tables have changed since."""
        if not self._is_current():
            raise RuntimeError(
                "the cache has changed since these keys and values were handed out; read them from the cache "
                "again"
            )

    def written(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots [n] that take the new tokens, and which of the rows * new tokens those are (None: all of
        them).
        """
        if device not in self._written:
            self.check()
            slots: list[int] = []
            sources: list[int] = []
            for i, table in enumerate(self.tables):
                count = min(self.new, table.length)
                slots += [table.slot(position) for position in range(table.length - count, table.length)]
                sources += range((i + 1) * self.new - count, (i + 1) * self.new)
            every = len(slots) == self.rows * self.new
            self._written[device] = (
                upload(slots, device),
                None if every else upload(sources, device),
            )
        return self._written[device]

    def targets(self, device: torch.device) -> torch.Tensor:
        """Slots [rows * new] that take the new tokens, -1 for padding, which takes none."""
        slots, sources = self.written(device)
        if sources is None:
            return slots
        return torch.full((self.rows * self.new,), -1, device=device).index_copy_(0, sources, slots)

    def table(self, device: torch.device) -> torch.Tensor:
        """Block ids [rows, at least the most blocks of a row], int32: token t of row i lies in block t //
        block_size of row i.

        Unused places (behind a window, after a shorter row's end) name some existing block.
        """
        tables = self.workspace.setdefault("tables", {})
        if device not in tables:
            self.check()
            width = -(-max(max(table.end for table in self.tables), 1) // WIDTHS) * WIDTHS
            rows = [[0] * table.released + table.blocks + [0] * (width - table.end) for table in self.tables]
            tables[device] = upload(rows, device, torch.int32)
        found: torch.Tensor = tables[device]
        return found

    def lengths(self, device: torch.device) -> torch.Tensor:
        """The tokens [rows] of each row, int32."""
        if device not in self._lengths:
            self.check()
            self._lengths[device] = upload([table.length for table in self.tables], device, torch.int32)
        return self._lengths[device]

    def blocks(self, first: int, device: torch.device) -> torch.Tensor:
        """Block ids [rows, n] from the block of column `first` on, for rows without padding."""
        if (device, first) not in self._blocks:
            self.check()
            begin = first // self.block_size
            ids = list(chain.from_iterable(table.blocks[begin - table.released :] for table in self.tables))
            self._blocks[device, first] = upload(ids, device).view(self.rows, -1)
        return self._blocks[device, first]

    def slots(self, first: int, device: torch.device) -> torch.Tensor:
        """Slots [rows, columns - first], padding included: it points at the row's first token, so it is
        finite and masked.
        """
        if (device, first) not in self._slots:
            self.check()
            size = self.block_size
            filler = next((table.blocks[0] for table in self.tables if table.blocks), 0)
            width = max(len(table.blocks) for table in self.tables) or 1
            ids = torch.tensor(
                [table.blocks + [filler] * (width - len(table.blocks)) for table in self.tables], device="cpu"
            )
            released = torch.tensor([table.released for table in self.tables], device="cpu")[:, None]
            lengths = torch.tensor([table.length for table in self.tables], device="cpu")[:, None]
            starts = torch.tensor(self.starts or [0] * self.rows, device="cpu")[:, None]
            position = torch.arange(first, self.columns, device="cpu") - starts
            position = torch.minimum(position, lengths - 1).maximum(released * size)
            slots = ids.gather(1, position // size - released) * size + position % size
            self._slots[device, first] = slots.to(device)
        return self._slots[device, first]

    def visible(self, first: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Which columns from `first` on each new token sees, [rows or 1, 1, new, columns - first]; None: all
        of them.
        """
        if self.new == 1 and self.starts is None:
            return None
        key = (device, first, window)
        if key not in self._visible:
            self._visible[key] = self._make_visible(first, window, device)
        return self._visible[key]

    def _make_visible(self, first: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        column = torch.arange(first, self.columns, device=device)
        seen = None
        if self.new > 1:
            at = torch.arange(self.columns - self.new, self.columns, device=device)[:, None]
            seen = column <= at
            if window is not None:
                seen = seen & (column > at - window)
            seen = seen[None, None]
        if self.starts is not None and max(self.starts) > first:
            starts = upload(self.starts, device)[:, None]
            real = (column >= starts)[:, None, None]
            seen = real if seen is None else seen & real
        return seen
