"""The books of the host's memory: which groups wait there, what is in transfer, and what is not worth
bringing back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..blocks import BlockTable, Copy, blocks_needed, distinct, move
from .limits import KVCacheGroup
from .plan import Swaps
from .request import SequenceGroup


class Victim(NamedTuple):
    """A group to be preempted, as far as the policy that decides how needs it."""

    blocks: tuple[int, ...]
    """The blocks it holds of every pool, shared blocks counted once."""
    tokens: int
    """The tokens that would have to be computed again."""


Decide = Callable[[Victim], bool]
"""The decision to swap a victim. It is called before the books are read, and may make room on the host."""


def never(victim: Victim) -> bool:
    """Every victim is recomputed."""
    return False


class Swapping:
    """Moves whole groups between the device's pools and the host's.

    While a group waits on the host its sequences' `parked` tables name its blocks there; `computed` and the
    fork stay as they were. Every block is copied out, since a hash on the device lasts only until its block
    is needed; a block whose content the device still has cached is not copied back. Blocks that depend on
    dropped hashes (other weights, a pool given back) are never brought back.
    """

    def __init__(self, kv_groups: tuple[KVCacheGroup, ...], decide: Decide, verify: bool) -> None:
        self.kv_groups = kv_groups
        self.decide = decide
        self.verify = verify
        self.clear()

    def clear(self) -> None:
        """Nothing is on its way any more."""
        self.moves = False
        """True if blocks have moved in the books since the last plan."""
        self._out: list[dict[int, int]] = [{} for _ in self.kv_groups]
        """For every pool the host blocks to be filled, and the device blocks they are filled from, by the
        block's latest owner.
        """
        self._back: list[list[Copy]] = [[] for _ in self.kv_groups]

    def plan(self) -> Swaps:
        """The moves to be carried out before the rows of this step."""
        out = tuple(
            tuple(Copy(source, target) for target, source in kv_group.items()) for kv_group in self._out
        )
        swaps = Swaps(out, tuple(map(tuple, self._back)))
        self.clear()
        return swaps

    # ---- out

    def park(self, group: SequenceGroup) -> int | None:
        """Move a running group to the host, if that is wanted and there is room: the blocks that travel, None
        if it stays.
        """
        if (
            not group.leader.computed
            or group.complete
            or any(kv_group.host is None for kv_group in self.kv_groups)
            or self.stale(group)
        ):
            return None
        for i, kv_group in enumerate(self.kv_groups):
            for table in _tables(group, i):
                kv_group.kind.release(table)
        held = tuple(distinct(_tables(group, i)) for i in range(len(self.kv_groups)))
        # Common tokens are computed once in a recomputation.
        tokens = sum(sequence.computed for sequence in group.sequences)
        if group.forked:
            tokens -= (len(group.sequences) - 1) * group.common
        if not self.decide(Victim(held, tokens)):
            return None
        hosts = [kv_group.host for kv_group in self.kv_groups if kv_group.host is not None]
        if any(host.available < blocks for host, blocks in zip(hosts, held, strict=True)):
            return None
        self.moves = True
        for sequence in group.sequences:
            sequence.parked = tuple(BlockTable(host) for host in hosts)
        for i, of_kv_group in enumerate(self._out):
            for copy in move(_tables(group, i), [sequence.parked[i] for sequence in group.sequences]):
                of_kv_group[copy.target] = copy.source
        return sum(held)

    # ---- back

    def stale(self, group: SequenceGroup) -> bool:
        """True if a group was computed on blocks that were forgotten since."""
        return any(
            table.length and table.epoch != kv_group.pool.epoch
            for sequence in group.sequences
            for kv_group, table in zip(self.kv_groups, sequence.parked or sequence.tables, strict=True)
        )

    def there(self, group: SequenceGroup, i: int) -> dict[int, int]:
        """Which of a group's blocks on the host the device still has under their names, and where."""
        pool = self.kv_groups[i].pool
        found = {}
        for sequence in group.sequences:
            table = sequence.parked[i]
            for place in range(table.released, len(table.digests)):
                block = pool.names.lookup(table.digests[place])
                if block is not None and (
                    not self.verify
                    or pool.names.tokens(block) == _content(sequence.tokens, place, pool.block_size)
                ):
                    found[table.blocks[place - table.released]] = block
        return found

    def need(self, group: SequenceGroup, i: int, chunk: int) -> int:
        """The blocks of a pool that a group on the host needs for all its tokens, like `Group.need`."""
        most = group.need(i, chunk)
        if not group.forked:
            return most
        tables = [sequence.parked[i] for sequence in group.sequences]
        return min(
            most, distinct(tables) + blocks_needed(tables, [sequence.behind for sequence in group.sequences])
        )

    def bring_back(self, group: SequenceGroup) -> int:
        """Move a group from the host to the device's pools, which have room: the blocks to copy."""
        self.moves = True
        blocks = 0
        for i, of_kv_group in enumerate(self._back):
            parked = [sequence.parked[i] for sequence in group.sequences]
            copies = move(parked, _tables(group, i), self.there(group, i))
            of_kv_group += copies
            blocks += len(copies)
        for sequence in group.sequences:
            sequence.parked = ()
        return blocks


def _tables(group: SequenceGroup, i: int) -> list[BlockTable]:
    return [sequence.tables[i] for sequence in group.sequences]


def _content(tokens: list[int], place: int, size: int) -> tuple[int, ...]:
    return tuple(tokens[place * size : (place + 1) * size])
