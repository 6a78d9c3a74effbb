"""One step of one cache as index tensors: where to write, where to read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..blocks import TableView
from ..blocks.shared_reads import FIELDS
from .upload import upload

WIDTHS = 16
"""Tables are as wide as some multiple of this: for Triton such numbers are one kind, so a kernel is compiled
once for all of them.
"""
PLANS = "native"
"""Where a workspace keeps the plans of the C++ op."""
CPU = torch.device("cpu")


class StridedView(NamedTuple):
    """Rows at equal distances: token t of row i is in slot first + i * stride + t: one strided view."""

    first: int
    stride: int

    def view(self, data: torch.Tensor, rows: int, first: int, end: int) -> torch.Tensor:
        """Columns from `first` to `end` of data [..., slots, heads, dim], as [..., rows, heads, end - first,
        dim].
        """
        *outer, _, heads, dim = data.shape
        *steps, token, head, _ = data.stride()
        return data.as_strided(
            (*outer, rows, heads, end - first, dim),
            (*steps, self.stride * token, head, token, 1),
            data.storage_offset() + (self.first + first) * token,
        )


class Singles(NamedTuple):
    """Rows of one new token, read together: row i attends to `slots[i]` where `mask[i]` is true."""

    tokens: torch.Tensor | None
    """Their places [rows] in the row of tokens; None if they are all there is."""
    slots: torch.Tensor
    """[rows * columns]; outside what a row sees its last token's, so what is read is finite."""
    mask: torch.Tensor
    """[rows, 1, 1, columns]"""


class Span(NamedTuple):
    """A row of several new tokens, from place `begin` to `end`."""

    begin: int
    end: int
    slots: torch.Tensor | None
    """[columns] of all that it sees; None if the step's own tokens are all there is."""
    mask: torch.Tensor | None
    """[1, 1, new, columns]; None where `causal` suffices."""


class SpanTensors(NamedTuple):
    """The sequences of a captured step whose rows are single tokens, at most `most` sequences, int32."""

    table: torch.Tensor
    """Block ids [most, width]."""
    totals: torch.Tensor
    """The tokens [most] of each with this step's."""
    borders: torch.Tensor
    """[most + 1]: sequence i has the rows from borders[i] to borders[i + 1]."""
    alone: torch.Tensor
    """`totals` of sequences with one new token, 0 of others."""


class Batch(ABC):
    """Where the tokens of every row lie in a step. Readers know no other interface, whatever kind it is."""

    rows: int
    """The rows of keys and values that a model hands to its cache."""
    new: int
    """The new tokens of each row."""
    longest: int
    """The most new tokens of a sequence."""
    columns: int
    """The columns of the cache after the step, left padding included."""
    block_size: int
    workspace: dict[str, Any]
    """State beyond a step: plans of kernels, and the device's copy of the tables until a block changes."""
    step: object
    """A new object in every step, for which kernels update their plans."""
    captured = False
    """True if it belongs to a captured step: replays have other lengths in the same tensors."""
    packed = False
    """True if one row of the model holds the new tokens of all sequences, which only attention separates."""
    plain = True
    """True if every row of the model is one sequence."""
    fresh = False
    """True if this step's tokens are all there is."""
    empty = False
    """True if nothing but padding was seen so far, so that no slot holds anything."""
    starts: list[int] | None = None
    """The first column of each row behind its left padding; None without padding."""
    strided: StridedView | None = None
    """Where the tokens lie, if at equal distances."""
    new_strided: StridedView | None = None
    """Where the new tokens lie, if at equal distances."""
    spans: SpanTensors | None = None
    """Sequences of several tokens among rows that are single tokens."""

    def groups_on(self, device: torch.device) -> torch.Tensor | None:
        """Groups of sequences that read common blocks together [sequences, 8]; None if each reads all of its
        own.
        """
        return None

    def spans_on(self, device: torch.device) -> SpanTensors | None:
        """The same for the layers of a device."""
        return self.spans

    def check(self) -> None:  # noqa: B027 - most batches need no check
        """Raise if the tables have changed since."""

    def first_visible(self, window: int | None) -> int:
        """The first column that any of the new tokens may attend to."""
        return 0

    @abstractmethod
    def written(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots [n] that take the new tokens, and which of the rows * new tokens those are (None: all)."""

    @abstractmethod
    def targets(self, device: torch.device) -> torch.Tensor:
        """Slots [rows * new] that take the new tokens, -1 for padding and missing rows, which take none."""

    @abstractmethod
    def table(self, device: torch.device) -> torch.Tensor:
        """Block ids [sequences, at least the most blocks of one], int32: token t of sequence i lies in block
        t // block_size of row i. Unused places (behind a window, after a shorter sequence) name some block.
        """

    def host_table(self) -> torch.Tensor:
        """The same on the CPU, made in the fastest way."""
        return self.table(CPU)

    @abstractmethod
    def lengths(self, device: torch.device) -> torch.Tensor:
        """The tokens [sequences] of each sequence with this step's, int32; 0 for a missing row."""

    def borders_on(self, device: torch.device) -> torch.Tensor:
        """Borders [sequences + 1] of the sequences' new tokens, one sequence after the other, int32."""
        new = self.new
        return torch.arange(0, (self.rows + 1) * new, new, dtype=torch.int32, device=device)

    def blocks(self, first: int, device: torch.device) -> torch.Tensor | None:
        """Block ids [rows * n] from the block of column `first` on; None where only `slots` are known."""
        return None

    @abstractmethod
    def slots(self, first: int, device: torch.device) -> torch.Tensor:
        """Slots [rows, columns - first]. What a row does not see names one of its tokens: finite, masked."""

    @abstractmethod
    def visible(self, first: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Which columns from `first` on each new token sees, [rows or 1, 1, new, columns - first]; None: all
        of them.
        """

    def parts(self, window: int | None, device: torch.device) -> tuple[Singles | None, list[Span]] | None:
        """Reads of plain torch in a `packed` batch: rows of one token together, longer ones one by one."""
        return None

    @property
    def positions(self) -> int:
        """How many positions plain torch reads of each row."""
        return self.columns


class RowBatch(Batch):
    """A step in which every row is a sequence, after it.

    Columns count as transformers does, left padding included: row i begins at column starts[i], and column c
    of it is token c - starts[i] of its table. The batch reads tables that others may change later; it refuses
    to answer then.
    """

    def __init__(
        self,
        tables: Sequence[TableView],
        starts: list[int] | None,
        columns: int,
        new: int,
        strided: StridedView | None,
        is_current: Callable[[], bool],
        workspace: dict[str, Any] | None = None,
        counts: Sequence[int] | None = None,
        groups: Callable[[], array[int]] | None = None,
    ) -> None:
        """groups: of rows that read common blocks together, as `SharedReads.follow` answers them."""
        self.tables = tables
        self._taken = counts
        """The new tokens of each row, its last ones; None if all of a row's are `new` or behind its start."""
        self.starts = starts
        self.columns = columns
        self.new = new
        self.strided = strided
        self.new_strided = strided
        self.rows = len(tables)
        self.longest = new
        self.fresh = new == columns
        self.block_size = tables[0].pool.block_size if tables else 0
        self.step = object()
        self._is_current = is_current
        self._groups = groups
        self.workspace = {} if workspace is None else workspace
        self._written: dict[torch.device, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._blocks: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._slots: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._lengths: dict[torch.device, torch.Tensor] = {}
        self._visible: dict[tuple[torch.device, int, int | None], torch.Tensor | None] = {}

    @property
    def empty(self) -> bool:  # type: ignore[override]
        return not self.columns or (
            self.starts is not None and not any(table.length for table in self.tables)
        )

    def first_visible(self, window: int | None) -> int:
        return 0 if window is None else max(0, self.columns - (window - 1 + self.new))

    def check(self) -> None:
        if not self._is_current():
            raise RuntimeError(
                "the cache has changed since these keys and values were handed out; read them from the cache "
                "again"
            )

    def written(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        if device not in self._written:
            self.check()
            slots: list[int] = []
            sources: list[int] = []
            for i, table in enumerate(self.tables):
                count = min(self.new, table.length) if self._taken is None else self._taken[i]
                slots += [table.slot(position) for position in range(table.length - count, table.length)]
                sources += range((i + 1) * self.new - count, (i + 1) * self.new)
            every = len(slots) == self.rows * self.new
            self._written[device] = (
                upload(slots, device),
                None if every else upload(sources, device),
            )
        return self._written[device]

    def targets(self, device: torch.device) -> torch.Tensor:
        slots, sources = self.written(device)
        if sources is None:
            return slots
        return torch.full((self.rows * self.new,), -1, device=device).index_copy_(0, sources, slots)

    def table(self, device: torch.device) -> torch.Tensor:
        tables = self.workspace.setdefault("tables", {})
        if device not in tables:
            self.check()
            width = -(-max(max(table.end for table in self.tables), 1) // WIDTHS) * WIDTHS
            rows = [[0] * table.released + table.blocks + [0] * (width - table.end) for table in self.tables]
            tables[device] = upload(rows, device, torch.int32)
        found: torch.Tensor = tables[device]
        return found

    def lengths(self, device: torch.device) -> torch.Tensor:
        if device not in self._lengths:
            self.check()
            self._lengths[device] = upload([table.length for table in self.tables], device, torch.int32)
        return self._lengths[device]

    def host_table(self) -> torch.Tensor:
        """Where rows lie side by side it is counted out, not put together from lists."""
        if self.strided is None or self.packed:
            return self.table(CPU)
        key = (self.strided, self.rows, max(table.end for table in self.tables))
        known, table = self.workspace.get("strided", (None, None))
        if known != key:
            (first, stride), rows, width = key
            begins = torch.arange(first, first + rows * stride, stride, dtype=torch.int32, device=CPU)
            table = begins[:, None] // self.block_size
            table = table + torch.arange(max(width, 1), dtype=torch.int32, device=CPU)
            self.workspace["strided"] = (key, table)
        counted: torch.Tensor = table
        return counted

    def groups_on(self, device: torch.device) -> torch.Tensor | None:
        """Only the C++ op of CPUs reads together in steps that are launched one operation at a time."""
        if self._groups is None or device != CPU:
            return None
        if "groups" not in self.workspace:
            self.check()
            numbers = self._groups()
            members = numbers[1] if numbers else 0  # of a first group
            groups = torch.frombuffer(numbers, dtype=torch.int32).view(-1, FIELDS) if members else None
            self.workspace["groups"] = groups
        found: torch.Tensor | None = self.workspace["groups"]
        return found

    def blocks(self, first: int, device: torch.device) -> torch.Tensor | None:
        if self.starts is not None:
            return None
        if (device, first) not in self._blocks:
            self.check()
            begin = first // self.block_size
            ids = list(chain.from_iterable(table.blocks[begin - table.released :] for table in self.tables))
            self._blocks[device, first] = upload(ids, device)
        return self._blocks[device, first]

    def slots(self, first: int, device: torch.device) -> torch.Tensor:
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
