"""Checks of the bytes in an engine's blocks: verify="bytes"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from ...blocks import Corruption
from ...kv import LayerGroup
from ...kv.checksums import Agree, ByteChecks
from ...scheduling import SequenceGroup


class VerifyStats(TypedDict):
    """Blocks that were compared with their checksums, and those of other bytes."""

    checked: int
    mismatched: int


class BlockChecks:
    """The checks of all layer groups, from the books to the requests that hold a corrupted block.

    The scheduler's books say what is full, shared, copied, swapped and evicted. It is carried out before the
    writes of the next step, on every rank. The host reads the results behind the tokens of a step. Without
    groups nothing is verified.
    """

    def __init__(self, groups: Iterable[LayerGroup]) -> None:
        self.groups = tuple(groups)
        for group in self.groups:
            group.verify_bytes(True)
        self._left: dict[tuple[int, int], Corruption] = {}
        """By layer group and block the corrupted blocks that went to the host."""

    # ---- before a step

    @property
    def due(self) -> bool:
        """True if blocks must be checked before the next write."""
        return any(group.pool.sealed is not None and group.pool.sealed.is_due for group in self.groups)

    def take(self) -> ByteChecks:
        """The checks that the books ask for, each once."""
        sealed = [group.pool.sealed for group in self.groups if group.pool.sealed is not None]
        due = tuple([each.take_due() for each in sealed])
        return ByteChecks(due, tuple([each.take_fresh() for each in sealed]))

    def take_fresh(self) -> ByteChecks:
        """The checksums that are to be taken, and no comparison."""
        sealed = [group.pool.sealed for group in self.groups if group.pool.sealed is not None]
        return ByteChecks(((),) * len(sealed), tuple([each.take_fresh() for each in sealed]))

    def carry_out(self, checks: ByteChecks) -> None:
        """Compare and take checksums on the devices, in the order of their work."""
        for group, due, fresh in zip(self.groups, checks.due, checks.fresh, strict=False):
            if group.checksums is not None:
                group.checksums.compare(due)
                group.checksums.take(fresh)

    def launch(self, agree: Agree | None = None, read: bool = True) -> None:
        """Bring the results so far to the host. agree: makes them those of all ranks. read: whether they are
        read here.
        """
        for group in self.groups:
            if group.checksums is not None:
                group.checksums.launch(agree)
                if not read:
                    group.checksums.forget()

    # ---- behind it

    def found(self) -> bool:
        """Wait for the results that were launched: true if any block is corrupted."""
        some = False
        for i, group in enumerate(self.groups):
            for each in () if group.checksums is None else group.checksums.found():
                some = True
                if each.event == "swapped out":
                    self._left[i, each.heir] = each
        return some

    def held_by(self, group: SequenceGroup) -> Corruption | None:
        """A corrupted block that a request holds, on the device or on the host."""
        for i, each in enumerate(self.groups):
            spoiled = {} if each.pool.sealed is None else each.pool.sealed.spoiled
            for sequence in group.sequences:
                for block in sequence.tables[i].blocks if spoiled else ():
                    if block in spoiled:
                        return spoiled[block]
                for block in sequence.parked[i].blocks if sequence.parked and self._left else ():
                    if (i, block) in self._left:
                        return self._left[i, block]
        return None

    def settle(self) -> None:
        """The requests that held corrupted blocks have ended."""
        self._left.clear()

    def forget(self) -> None:
        """A step broke off: no block has a checksum any more."""
        self._left.clear()
        for group in self.groups:
            if group.checksums is not None:
                group.checksums.forget()
            if group.pool.sealed is not None:
                group.pool.sealed.clear()

    def stats(self) -> VerifyStats:
        """Blocks that were checked, and those of other bytes."""
        counts = [group.pool.counts for group in self.groups]
        return {
            "checked": sum(each["checked"] for each in counts),
            "mismatched": sum(each["mismatched"] for each in counts),
        }
