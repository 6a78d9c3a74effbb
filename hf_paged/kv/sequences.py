"""The rows of one cache in all its groups, and their delayed operations (forks, reorders)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..blocks import COLUMNS, NO_NUMBERS, BlockTable, LayerKind, Numbers
from ..blocks.columns import no_column, selected, with_numbers
from .batch import Batch
from .group import LayerGroup, Memory
from .history import TokenHistory
from .rows import Rows
from .state_rows import StateRows
from .static import StaticBatch
from .upload import upload


class Sequences:
    """State shared by a cache and its layers: one `Rows` per kind of layer, all holding the same rows.

    Two operations are deferred. `sources`: a row stands for all rows that are equal to it (beams, samples, a
    prompt that was given several times) or that have ended, and is forked when they are computed. A pending
    reorder: its indices are being copied from the device and are applied when the next step is planned. A
    reader of rows settles both first (C16): the cache does, which also informs the layers that are not paged.
    """

    def __init__(self, memory: Memory, groups: Mapping[LayerKind, LayerGroup]) -> None:
        self.memory = memory
        self.rows = {kind: Rows(group) if kind.fills else StateRows(group) for kind, group in groups.items()}
        self.copies = 0
        """Rows into which the running call expanded each prompt; 0 if equal rows are not searched."""
        self.sources: list[int] | None = None
        """Row i of the call is row sources[i] here, until rows are forked; None afterwards."""
        self.padding_known = True
        """True if the rows' starts determine this call's attention mask."""
        self.static: Mapping[LayerKind, StaticBatch] | None = None
        """The index tensors of a step while it is captured."""
        self.numbers: Numbers = NO_NUMBERS
        """By column the numbers of the rows, which move with them."""
        self.static_columns: Mapping[str, torch.Tensor] = {}
        """The columns of a step while it is captured."""
        self._uploaded: dict[str, tuple[object, torch.Tensor]] = {}
        """By column the numbers that were uploaded last, and where they are."""
        self.changes_all = False
        """True while the cache changes its rows, so that all layers may take part."""
        self.history: TokenHistory | None = None
        """The tokens of the rows, if other caches may reuse their blocks."""
        self.counts: list[int] | None = None
        """The tokens that each row takes of the step that runs; None for all."""
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    @property
    def columns(self) -> int:
        most = 0
        for rows in self.rows.values():
            most = rows.columns if rows.columns > most else most
        return most

    @property
    def positions(self) -> dict[LayerKind, int]:
        """The columns of each kind's rows: equal between two steps, except after a step that broke off."""
        return {kind: rows.columns for kind, rows in self.rows.items()}

    @property
    def starts(self) -> list[int] | None:
        return next((rows.starts for kind, rows in self.rows.items() if kind.fills), None)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each row."""
        whole = [self.columns] * self.count
        return next((rows.lengths for kind, rows in self.rows.items() if kind.fills), whole)

    @property
    def count(self) -> int:
        """The rows stored; 0 before the first step."""
        return max((rows.count for rows in self.rows.values() if rows.columns), default=0)

    def keep_history(self) -> TokenHistory:
        """Record the tokens of the rows from the first one on, for prefix reuse."""
        self.history = TokenHistory()
        for rows in self.rows.values():
            rows.keeps_prefixes = True
        return self.history

    def expect(self, columns: int) -> None:
        """Set the most columns that rows are expected to have."""
        for rows in self.rows.values():
            rows.expected_columns = columns

    def expect_rows(self, count: int) -> None:
        """Set the number of rows once equal ones are forked."""
        for rows in self.rows.values():
            rows.expected_rows = count

    @property
    def states(self) -> StateRows | None:
        """The rows of recurrent states; None if no layer keeps any."""
        return next((rows for rows in self.rows.values() if isinstance(rows, StateRows)), None)

    @property
    def expected(self) -> int:
        """The most columns that rows are expected to have; 0 if unknown."""
        return max((rows.expected_columns for rows in self.rows.values()), default=0)

    def begin_at(self, starts: list[int] | None) -> None:
        """Set the column at which each row begins; earlier columns are padding and are not stored."""
        for rows in self.rows.values():
            rows.begin_at(starts)

    def extend(self, kind: LayerKind, rows: int, new: int) -> Batch:
        """Plan a step of `new` columns for the layers of `kind`."""
        self.flush()
        return self.rows[kind].extend(rows, new, self.counts if kind.grows else None)

    # ---- columns

    def fill(self, rows: int) -> None:
        """Have the columns of so many new rows filled."""
        fillers = self.memory.row_fillers
        fillers.forget()  # rows of another call
        self.numbers = fillers.of(range(rows)) if fillers.by_name else NO_NUMBERS

    def put(self, name: str, numbers: Sequence[int]) -> None:
        """Give the rows their numbers of a column."""
        self.numbers = with_numbers(self.numbers, name, numbers)

    def column(self, name: str, device: torch.device) -> torch.Tensor | None:
        """The numbers of a column in the step that runs, on a device; None if all rows are empty there."""
        if name not in COLUMNS or not COLUMNS[name].captured:
            raise no_column(name)
        if self.static is not None:
            static = self.static_columns.get(name)
            return None if static is None else static.to(device)
        numbers = self.numbers.get(name)
        if numbers is None:
            return None
        held, tensor = self._uploaded.get(name, (None, None))
        if held != numbers or tensor is None or tensor.device != device:
            tensor = upload(list(numbers), device, getattr(torch, COLUMNS[name].dtype))
            self._uploaded[name] = numbers, tensor
        return tensor

    # ---- debts

    def reorder(self, index: torch.Tensor) -> None:
        """Replace row i by row index[i] before the next step; indices of a device are copied meanwhile."""
        self.flush()
        if index.device.type != "cuda":
            self.select(index.tolist())
            return
        host = torch.empty(index.shape, dtype=index.dtype, device="cpu", pin_memory=True)
        host.copy_(index, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(index.device))
        self._pending = (host, arrived)

    def flush(self) -> None:
        """Apply a pending reorder."""
        if self._pending is None:
            return
        index, arrived = self._pending
        self._pending = None
        arrived.synchronize()
        self.select(index.tolist())

    def hold(self, rows: Sequence[int], sources: list[int] | None) -> list[int]:
        """Hold these rows of the call from now on; row i of the call is row sources[i] here, all of them as
        they are if that is None. The answer names the rows that they were here.
        """
        places = list(rows) if self.sources is None else [self.sources[row] for row in rows]
        self.sources = sources
        if self.count:
            self.select(places)
        return places

    def select(self, sources: list[int]) -> None:
        """Make row i what row sources[i] was, for as many rows as there are sources."""
        with self.memory.lock:
            for rows in self.rows.values():
                if rows.columns:
                    rows.reorder(sources)
            self.numbers = selected(self.numbers, sources)
            if self.history is not None:
                self.history.select(sources)

    # ---- all kinds at once

    @contextmanager
    def changing_all(self) -> Iterator[None]:
        """Have the layers change with the rows."""
        with self.memory.lock:
            self.changes_all = True
            try:
                yield
            finally:
                self.changes_all = False

    def check_past(self, columns: int) -> None:
        """Raise if a window cannot go back `columns` columns."""
        for rows in self.rows.values():
            if rows.columns:
                rows.require_whole()
                rows.check_past(columns)

    @contextmanager
    def taking(self, counts: Sequence[int]) -> Iterator[None]:
        """Have each row take only its last counts[i] columns of the steps inside."""
        self.flush()
        if self.history is not None:
            raise ValueError(
                "rows whose blocks other caches reuse take as many tokens each; make the cache without "
                "prefix_caching"
            )
        self.counts = list(counts)
        try:
            yield
        finally:
            self.counts = None

    def crop(self, columns: int) -> None:
        self.flush()
        with self.memory.lock:
            self.check_past(columns)
            for rows in self.rows.values():
                if rows.columns:
                    rows.crop(columns)
            if self.history is not None:
                self.history.crop(columns)

    def keep_past(self) -> None:
        """Keep tokens behind windows until `crop`, so that a step can be rolled back."""
        for rows in self.rows.values():
            rows.keep_past = True

    def fork(self) -> Sequences:
        """A second cache's sequences over the same blocks, after delayed operations; no tensor moves."""
        twin = Sequences(self.memory, {kind: rows.group for kind, rows in self.rows.items()})
        twin.rows = {kind: rows.fork() for kind, rows in self.rows.items()}
        twin.padding_known = self.padding_known
        twin.numbers = self.numbers
        twin.history = None if self.history is None else self.history.fork()
        return twin

    def exchange(self, other: Sequences) -> None:
        """Hold the rows of another cache over the same groups, which gets those of this one."""
        for name in ("rows", "history", "numbers", "padding_known"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, mine)

    def free(self) -> None:
        """Free every block."""
        self._pending = None
        self.sources = None
        self.copies = 0
        self.numbers = NO_NUMBERS
        for rows in self.rows.values():
            rows.expected_rows = 0
            rows.free()
        if self.history is not None:
            self.history.clear()

    def tables(self, kind: LayerKind) -> list[BlockTable]:
        """The tables of the rows in the group of `kind`, after delayed operations."""
        self.rows[kind].require_whole()
        return self.rows[kind].tables
