"""Steps that may run again, and steps that may run once.

Keys and values that are written twice are the same keys and values. A recurrent state that is advanced twice
is another state, and nothing shows it. So a layer with such a state keeps it in slots, and a step names for
each row the slot that it reads and the slot that it writes. While no row writes what a row reads, any number
of runs leaves the same states; a row that writes where it reads runs exactly once.

Every run of a step, a forward or a replay, begins with `SlotStates.begin`. It compares the tokens behind each
state that is read with those before the row, and refuses a run over states that an earlier run has advanced.
A run that broke off counts as one. The sequences of a refused run are computed again from their first token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from ..blocks import BlockTableArray

NO_SLOT = -1
"""The slot of a row without a past, which reads no state."""


class StatesAdvanced(RuntimeError):
    """A run that would advance states which it does not find as they were before its step."""


class StateRow(NamedTuple):
    """`count` tokens of a sequence from `start` on."""

    owner: Hashable
    """The row that its sequence owns in the engine, or the number of the row in generate()."""
    start: int
    count: int  # type: ignore[assignment]  # nothing uses a row as a tuple


class StateSlots(NamedTuple):
    """The slots of a step's states, by row: each row reads one and writes one. NO_SLOT: it has none to read,
    or what it would write is dropped.
    """

    read: tuple[int, ...] = ()
    written: tuple[int, ...] = ()

    @property
    def repeatable(self) -> bool:
        """True if any number of runs leaves the same states: no row writes a slot that a row reads."""
        return {*self.read}.isdisjoint({*self.written} - {NO_SLOT})


class SlotStates(ABC):
    """The recurrent states of a cache: which slots the running step reads and writes, and the tokens behind
    the state in each.

    The owner of the slots names them (`slots_of`): copies on write, forks, and room for a step to be
    repeated are its choice of two numbers.
    """

    def __init__(self) -> None:
        self.rows: Sequence[StateRow] = ()
        self.slots = StateSlots()
        """The rows of the running step, and their slots."""
        self.tokens: dict[int, int] = {}
        """The number of tokens behind the state in each slot."""

    @abstractmethod
    def slots_of(self, rows: Sequence[StateRow]) -> StateSlots:
        """The slots of a step of these rows. It may be asked any number of times, before a run and after it:
        the slot that a row reads stays the same until a step of later tokens.
        """

    def begin(self, rows: Sequence[StateRow] = ()) -> None:
        """Begin a run of these rows; raises StatesAdvanced if one would read another state than its own."""
        slots = self.slots_of(rows)
        _require_apart(slots)
        for row, slot in zip(rows, slots.read, strict=True):
            if not self._holds(slot, row):
                raise StatesAdvanced(
                    f"a run of {row.count} tokens behind {row.start} would read a recurrent state behind "
                    f"{self.tokens.get(slot, 0)}; compute the sequence again from its first token"
                )
        self.rows = rows
        self.slots = slots
        for row, slot in zip(rows, slots.written, strict=True):
            if slot != NO_SLOT:
                self.tokens[slot] = row.start + row.count

    def may_repeat(self, rows: Sequence[StateRow]) -> bool:
        """True if a step of these rows, before it has run, may run twice."""
        return self.slots_of(rows).repeatable

    @property
    def is_unused(self) -> bool:
        """True if no layer has kept a state here yet."""
        return False

    def follow(self, tables: Sequence[BlockTableArray]) -> None:  # noqa: B027 - they know their slots
        """The tables that the next step's rows are places in."""

    def expect(self, shape: Sequence[int]) -> None:  # noqa: B027 - states that only we run need none
        """A plain forward of tokens [rows, new] is about to run."""

    def forward(self) -> AbstractContextManager[None]:
        """Around the forward of a run; layers that write to their slots themselves need nothing."""
        return nullcontext()

    def end(self) -> None:  # noqa: B027 - as above
        """A plain forward has ended."""

    def may_run(self, rows: Sequence[StateRow]) -> bool:
        """True if the states that rows read are those before their step: it has not run, or may run again."""
        return all(map(self._holds, self.slots_of(rows).read, rows))

    def _holds(self, slot: int, row: StateRow) -> bool:
        return not row.start if slot == NO_SLOT else self.tokens.get(slot) == row.start


def _require_apart(slots: StateSlots) -> None:
    """Raise if a row writes a slot that another row reads or writes: the order of rows would decide."""
    readers = Counter(slots.read)
    writers = Counter(slots.written)
    for read, written in zip(slots.read, slots.written, strict=True):
        if written != NO_SLOT and (readers[written] > (read == written) or writers[written] > 1):
            raise ValueError(f"a row writes its state to slot {written}, which another row of its step uses")


def states_of(layers: Iterable[object]) -> SlotStates | None:
    """The states that layers of a cache keep in slots, which these layers have as `states`; None if none
    does.
    """
    found = (getattr(layer, "states", None) for layer in layers)
    return next((states for states in found if isinstance(states, SlotStates)), None)


def rows_at(start: int, rows: int, new: int) -> list[StateRow]:
    """A step of `new` tokens of each row of generate() behind `start` columns."""
    return [StateRow(row, start, new) for row in range(rows)]
