"""The blocks of a pool that no step writes any more, and what happens to them: for checks of their bytes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

ByteEvent = Literal["shared", "copied", "swapped out", "swapped in", "evicted"]
"""An occasion to check the bytes of a block. A prefix hit and a fork share it."""
NO_HEIR = -1


class Due(NamedTuple):
    """A sealed block that is to be checked. heir: the block that its content goes to, if it is copied; on the
    host, if it is swapped out.
    """

    block: int
    event: ByteEvent
    heir: int = NO_HEIR


class Corruption(NamedTuple):
    """A block whose bytes are not those that were computed. layer: the first layer that shows it. heir: the
    block that has its content now.
    """

    kind: str
    block: int
    event: ByteEvent
    layer: int
    heir: int = NO_HEIR

    def __str__(self) -> str:
        return (
            f"the bytes in block {self.block} of the {self.kind} layers have changed since they were "
            f"computed (found when the block was {self.event}, first in layer {self.layer})"
        )


class SealedBlocks:
    """The blocks of one pool whose bytes are final: full of computed tokens, or named.

    A seal ends where the content is about to change or is given up. A pool has one of these if its bytes are
    verified. The owner of the bytes takes checksums of fresh blocks, and compares those that are due before
    the next write.
    """

    def __init__(self) -> None:
        self._summed: set[int] = set()
        """Sealed blocks with a checksum."""
        self._fresh: dict[int, None] = {}
        """Those whose checksum is still to be taken."""
        self._due: dict[Due, None] = {}
        self.spoiled: dict[int, Corruption] = {}
        """Held blocks whose content is known to be wrong."""

    def __contains__(self, block: int) -> bool:
        return block in self._summed or block in self._fresh

    @property
    def is_due(self) -> bool:
        """True if a check must precede the next write."""
        return bool(self._due)

    # ---- what happens to a block

    def seal(self, block: int) -> None:
        """No step writes in `block` any more."""
        if block not in self._summed:
            self._fresh[block] = None

    def lift(self, block: int) -> None:
        """The content of `block` is about to change."""
        self._summed.discard(block)
        self._fresh.pop(block, None)

    def free(self, block: int) -> None:
        """The content of `block` is given up."""
        self.lift(block)
        self.spoiled.pop(block, None)

    def note(self, block: int, event: ByteEvent, heir: int = NO_HEIR) -> None:
        """Something happens to `block`, which is an occasion to check it."""
        if block in self._summed:
            self._due[Due(block, event, heir)] = None

    def spoil(self, blocks: Collection[int], found: Corruption) -> None:
        """The content of held blocks is wrong."""
        self.spoiled.update(dict.fromkeys(blocks, found))

    def clear(self) -> None:
        """No block has a checksum any more."""
        self._summed.clear()
        self._fresh.clear()
        self._due.clear()

    # ---- what is to be done

    def take_due(self) -> tuple[Due, ...]:
        """The blocks to check before the next write, each event once."""
        due = tuple(self._due)
        self._due.clear()
        return due

    def take_fresh(self) -> tuple[int, ...]:
        """The blocks to take checksums of; `sum` them once that is done."""
        fresh = tuple(self._fresh)
        self._fresh.clear()
        return fresh

    def sum(self, blocks: Collection[int]) -> None:
        """Blocks that were fresh have checksums now."""
        self._summed.update(blocks)

    # ---- the audit

    def check(self, states: Collection[int], free: int) -> None:
        """Raise AssertionError if a free block is sealed or spoiled."""
        places = list(states)
        for block in (*self._summed, *self._fresh, *self.spoiled):
            if places[block] == free:
                raise AssertionError(f"block {block} is free and sealed")
