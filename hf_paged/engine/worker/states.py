"""Recurrent states of an engine's sequences: each has a slot, which its steps read and write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...blocks import NO_NUMBERS, STATE_READ, STATE_WRITTEN, BlockTableArray, Numbers
from ...kv import LayerGroup, Sequences
from ...model.state_layers import StoredStates
from ...model.state_slots import NO_SLOT, StateRow, StateSlots


class SequenceStates(StoredStates):
    """A sequence behind tokens reads its slot and writes it, so such a step runs once. A trial run of a step
    writes nothing.
    """

    def __init__(self, sequences: Sequences, group: LayerGroup, number: int) -> None:
        """number: that of the group among those whose tables steps name."""
        super().__init__(sequences, group)
        self._number = number
        self._tables = BlockTableArray()
        self._writes = True
        self._loaded: tuple[StateSlots, Numbers] = StateSlots(), NO_NUMBERS
        """The last slots as columns, one object while they stay."""

    def follow(self, tables: Sequence[BlockTableArray]) -> None:
        self._tables = tables[self._number]

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Runs inside write no state, so that the step may run again."""
        self._writes = False
        try:
            yield
        finally:
            self._writes = True

    def slots_of(self, rows: Sequence[StateRow]) -> StateSlots:
        slots = [int(self._tables.read(int(str(row.owner)), 0, 1)[0]) for row in rows]
        read = [slot if row.start else NO_SLOT for slot, row in zip(slots, rows, strict=True)]
        return StateSlots(tuple(read), tuple(slots) if self._writes else (NO_SLOT,) * len(slots))

    def columns_of(self, rows: Sequence[StateRow]) -> Numbers:
        """The slots of some rows of the running step, as columns."""
        slots = self.slots_of(rows)
        known, numbers = self._loaded
        if slots != known:
            numbers = {STATE_READ.name: slots.read, STATE_WRITTEN.name: slots.written}
            self._loaded = slots, numbers
        return numbers
