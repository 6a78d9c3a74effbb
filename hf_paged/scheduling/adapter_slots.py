"""Which adapters have a slot on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from ..blocks.pool import expect

AdapterNames = tuple[str, ...]
"""The adapters of a request, which are added up; none for the model alone."""


class AdapterSlots:
    """Slots of adapters, the least recently used of which makes room for another.

    The slot of an adapter that a running request has is not given away, and requests of the model alone need
    none: a request whose adapter finds no slot keeps its place and delays no other (C33).
    """

    def __init__(
        self,
        count: int,
        load: Callable[[AdapterNames, int], None],
        ready: Callable[[AdapterNames], bool],
        apart: Callable[[AdapterNames], bool] = lambda adapter: False,
        most_apart: int = 0,
    ) -> None:
        """load: begins to bring an adapter into a slot; raises MemoryError if the device has no memory for it
        beside the others. ready: whether it is there and can be used. apart: whether its rows are computed in
        a forward of their own. most_apart: how many such ones running requests may have at once.
        """
        self.count = count
        self.most = count
        """How many adapters the device has had memory for at once, until one goes."""
        self.bring: Callable[[AdapterNames, int, Callable[[], None]], None] = _here
        """Does what brings adapters into a slot, on all ranks where several compute the model."""
        self._apart = apart
        self._most_apart = most_apart
        self._load = load
        self._ready = ready
        self._slots: OrderedDict[AdapterNames, int] = OrderedDict()
        """The least recently used first. Slots that are not here are free: an interrupt can lose none."""

    def __contains__(self, adapter: AdapterNames) -> bool:
        return adapter in self._slots

    def __iter__(self) -> Iterator[AdapterNames]:
        return iter(self._slots)

    def slot(self, adapter: AdapterNames) -> int:
        """The slot of an adapter; -1 for the model alone."""
        return self._slots[adapter] if adapter else -1

    def acquire(self, adapter: AdapterNames, pinned: Collection[AdapterNames]) -> bool:
        """True if a request can run with an adapter now. If it has no slot, it gets one that no `pinned`
        adapter has, and begins to be loaded.
        """
        if not self._may_run(adapter, pinned):
            return False
        if adapter not in self._slots:
            slot = self._take(pinned)
            if slot is None:
                return False
            self._slots[adapter] = slot
            try:
                self._load(adapter, slot)
            except MemoryError:
                self.release(adapter)
                if not self._slots:
                    raise
                self.most = len(self._slots)
                return False
            except BaseException:
                self.release(adapter)
                raise
        self._slots.move_to_end(adapter)
        return self._ready(adapter)

    def reserve(self, adapter: AdapterNames, pinned: set[AdapterNames]) -> bool:
        """The same for a request that waits, whose slot no later one gets."""
        if not self._may_run(adapter, pinned):
            return False
        there = self.acquire(adapter, pinned)
        if there or adapter in self:
            pinned.add(adapter)
        return there

    def _may_run(self, adapter: AdapterNames, pinned: Collection[AdapterNames]) -> bool:
        """True if the forwards of running requests leave one for an adapter that needs its own."""
        if adapter in pinned or not self._apart(adapter):
            return True
        return sum(map(self._apart, pinned)) < self._most_apart

    def _take(self, pinned: Collection[AdapterNames]) -> int | None:
        taken = set(self._slots.values())
        if len(taken) < self.most:
            return next(slot for slot in range(self.count) if slot not in taken)
        oldest = next((adapter for adapter in self._slots if adapter not in pinned), None)
        return None if oldest is None else self._slots.pop(oldest)

    def release(self, adapter: AdapterNames) -> int | None:
        """Give a slot back: which it was, None if the adapter had none."""
        self.most = self.count
        return self._slots.pop(adapter, None)

    def place(self, adapter: AdapterNames, slot: int) -> None:
        """Let an adapter have a slot that another rank's slots have chosen."""
        self._slots = OrderedDict((other, taken) for other, taken in self._slots.items() if taken != slot)
        self._slots[adapter] = slot

    def check(self, running: Collection[AdapterNames]) -> None:
        """Recount: no slot is two adapters', and every running adapter has one."""
        slots = set(self._slots.values())
        expect(len(slots) == len(self._slots), "a slot belongs to two adapters")
        expect(slots <= set(range(self.count)), "an adapter has a slot that there is not")
        expect(set(running) <= self._slots.keys(), "a request runs whose adapter has no slot")


def _here(names: AdapterNames, slot: int, act: Callable[[], None]) -> None:
    """Bring adapters into a slot of this process."""
    act()
