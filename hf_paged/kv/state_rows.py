"""Rows of recurrent states: the slot that each reads in a step, and the slot that it writes."""

from __future__ import annotations

from collections.abc import Sequence

from ..blocks import BlockTable, Match, adopt, append, commit_tail
from .group import ROOM_FOR, LayerGroup
from .rows import Rows, other_rows

NO_SLOT = -1
"""The slot of a row without a past, which reads no state."""


class StateRows(Rows):
    """One slot per row. A step writes elsewhere than it reads, so that it may run again: the slots that were
    read are held until the rows change once more. Where a pool of fixed size has no room for that, rows that
    share no slot write where they read.

    A slot that others find by its name is a snapshot: it is read, and written by nobody.
    """

    def __init__(self, group: LayerGroup) -> None:
        super().__init__(group)
        self._before: list[BlockTable] = []
        """The tables before the last step, if it may run again."""
        self.begun = -1
        """The columns before the last step; -1 if rows have changed since."""
        self.read: tuple[int, ...] = ()
        """The slots that the last step reads."""
        self.padded = False
        """True if columns of padding are among those that states cover."""

    @property
    def written(self) -> tuple[int, ...]:
        """The slots that hold the rows' states."""
        return tuple(map(_slot, self._tables))

    def take(self, rows: int, new: int) -> None:
        """Take a step of `new` columns: choose its slots. On failure nothing has changed."""
        with self.group.memory.lock:
            if rows == self.count and self._turn(new):
                return
            self._forget_last()
            first_step = not self.columns
            if first_step:
                self._open(rows)
            elif rows != self.count:
                raise other_rows(self.count, rows)
            apart = self._make_slots(max(rows, self.expected_rows) if first_step else rows)
            with self._whole():
                begun = self.columns
                if apart:
                    self._before = [table.fork() for table in self._tables]
                self.read = self.written
                append(self._tables, [new] * len(self._tables))
                self.columns = begun + new
                self.begun = begun
                self._changed(new)

    def _turn(self, new: int) -> bool:
        """Let rows write where the last step has read, if they alone hold these slots and their own."""
        pool = self.group.pool
        references, names = pool.references, pool.names
        before = self._before
        if not before or any(references(table.blocks[0]) != 1 for table in (*before, *self._tables)):
            return False
        if any(table.blocks[0] in names for table in before):
            return False  # a snapshot, which is worth another slot
        with self._whole():
            now = self.group.pool.tick()
            self.read = self.written
            for table, old in zip(self._tables, before, strict=True):
                table.turn(old, new, now)
            self.begun = self.columns
            self.columns += new
            self._changed(new)
        return True

    def _make_slots(self, rows: int) -> bool:
        """Make room for a step of so many rows; true if each may write elsewhere than it reads."""
        group = self.group
        first_step = not self.columns
        if not group.fixed or group.pool.available >= rows:
            need = rows * (2 if first_step and not group.fixed else 1)
            group.make_room(need, self._ahead(need, rows) if self.keeps_prefixes else 0)
            return not first_step
        alone = all(table.blocks and group.pool.references(table.blocks[0]) == 1 for table in self._tables)
        if not alone:
            group.make_room(rows, 0)  # raises, with the numbers
        return False

    def _ahead(self, need: int, rows: int) -> int:
        """The slots that a growing pool is to have free: those needed, and what it lacks for snapshots."""
        wanted = self.group.config.state_snapshots
        wanted = ROOM_FOR * rows if wanted is None else wanted
        return need + max(0, wanted - self.group.pool.cached)

    def _forget_last(self) -> None:
        """Give back what the last step has read: it does not run again."""
        self.begun = -1
        if self._before:
            before, self._before = self._before, []
            for table in before:
                table.free()

    def _undo(self) -> None:
        """Be where the rows were before the last step."""
        with self._whole():
            for table in self._tables:
                table.free()
            if self._before:
                self._tables, self._before = self._before, []
            self.columns = self.begun
            self.begun = -1
            self._changed()

    # ---- rows come, go and change places

    def begin_at(self, starts: list[int] | None) -> None:
        """Padding is computed as the model's masks say, and a state covers it like any other column."""
        self.padded |= starts is not None and any(starts)

    def reorder(self, sources: Sequence[int]) -> None:
        with self.group.memory.lock:
            self._forget_last()
            super().reorder(sources)

    def return_to(self, columns: int, starts: list[int] | None) -> None:
        with self.group.memory.lock:
            if columns == self.columns:
                return
            self.check_past(self.columns - columns)
            if columns and columns == self.begun:
                self._undo()
                return
            self._forget_last()
            super().return_to(columns, None)

    def holds(self, columns: int) -> bool:
        """True if there are states behind the first `columns` columns: none or all of them, or those before a
        step whose states are still there.
        """
        return columns in (0, self.columns) or bool(columns == self.begun and self._before)

    def check_past(self, columns: int) -> None:
        """Raise unless rows are to go back to a place where there are states."""
        if not self.holds(self.columns - columns):
            raise RuntimeError(
                f"cannot go back {columns} tokens: a recurrent state covers all {self.columns}; use a new "
                "cache, or a copy.deepcopy of this one from before (layers that only convolve go back after "
                "activate_past_recording())"
            )

    def fork(self) -> StateRows:
        twin = super().fork()
        assert isinstance(twin, StateRows)
        twin.padded = self.padded
        return twin

    def free(self) -> None:
        with self.group.memory.lock:
            self._forget_last()
            super().free()
            self.padded = False

    # ---- snapshots

    def begin_with(self, found: Sequence[Match], columns: int, more: int) -> None:
        """Begin every row behind a snapshot of `columns` tokens. It is read where it lies: the first step
        writes elsewhere.
        """
        with self.group.memory.lock:
            self.free()
            self._open(len(found))
            with self._whole():
                for table, match in zip(self._tables, found, strict=True):
                    adopt(table, match)
                self.columns = columns
                self._changed()

    def commit(self, tokens: Sequence[Sequence[int]], extras: Sequence[bytes], dedupe: bool) -> None:
        """Name what the tokens [rows][columns] have come to, for other rows to begin with. Of padded rows a
        state is behind more columns than tokens, and keeps to its row.
        """
        if self.padded:
            return
        with self.group.memory.lock:
            for table, own, extra in zip(self._tables, tokens, extras, strict=True):
                commit_tail(table, own, extra)
            self.group.check_bytes()


def _slot(table: BlockTable) -> int:
    return table.blocks[0] if table.blocks else NO_SLOT
