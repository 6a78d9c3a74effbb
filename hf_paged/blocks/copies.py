"""Tables that go to another pool and come back: what they share is shared there too, and every block travels
once (C30).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .pool import NOWHERE, OutOfBlocks
from .table import BlockTable, Copy, _TableRow


def distinct(tables: Sequence[BlockTable]) -> int:
    """How many blocks the tables of one pool name together, each counted once."""
    return len({block for table in tables for block in table.blocks})


def move(
    sources: Sequence[BlockTable], targets: Sequence[BlockTable], there: Mapping[int, int] | None = None
) -> list[Copy]:
    """Let the empty target i hold in its pool what source i holds in another, and empty the sources.

    there: for blocks of the sources whose content the other pool has under a name, the block that has it;
    these are shared and not copied. The answer is what must be copied from pool to pool before either block
    is written again. Without room nothing is changed, and OutOfBlocks raised. Names go along with the tables
    as far as the blocks have them there; `commit` gives the rest.
    """
    images = dict(there or {})
    if any(table.blocks or table.length for table in targets) or len(sources) != len(targets):
        raise ValueError(f"{len(sources)} tables move into as many empty ones, not into {list(targets)}")
    if not sources:
        return []
    pool = targets[0].pool
    new = len({block for table in sources for block in table.blocks} - images.keys())
    room = pool.available - sum(1 for block in set(images.values()) if not pool.references(block))
    if new > room:
        raise OutOfBlocks(f"{new} blocks are to move into a pool that has room for {room} of {pool.total}")
    named = [_leading(table, images) if there is not None else len(table.digests) for table in sources]
    # Existing blocks are referenced first: taking a new block may evict an unreferenced one.
    kept = set(images)
    for table in sources:
        for block in table.blocks:
            if block in kept:
                pool.share(images[block])
    copies: list[Copy] = []
    now = pool.tick()
    for source, target, names in zip(sources, targets, named, strict=True):
        blocks = []
        for block in source.blocks:
            if block not in images:
                images[block] = pool.take(copies[-1].target + 1 if copies else NOWHERE, target.tenant)
                copies.append(Copy(block, images[block]))
                source.pool.note(block, "swapped out", images[block])  # only a device's pool has checksums
            elif block not in kept:
                pool.share(images[block])
            blocks.append(images[block])
        target._become(
            _TableRow(blocks, source.digests[:names], source.length, source.released, now, source.epoch)
        )
        source.free()
    return copies


def _leading(table: BlockTable, there: Mapping[int, int]) -> int:
    """How many of the table's leading names its blocks bear in the other pool as well."""
    return next(
        (
            place
            for place in range(table.released, len(table.digests))
            if table.blocks[place - table.released] not in there
        ),
        len(table.digests),
    )
