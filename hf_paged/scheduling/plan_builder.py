"""A plan in the making."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..blocks import BlockPool, BlockTable, Copy, blocks_needed, detach
from .limits import KVCacheGroup
from .plan import NOTHING, ScheduledRow, StepPlan, Swaps
from .request import SequenceGroup, TokenSequence

Steps = list[tuple[TokenSequence, int]]
"""Sequences of one group, and how many tokens each takes."""


class PlanBuilder:
    """The part of a step that is decided so far, and the tokens that it still has room for."""

    def __init__(self, kv_groups: int, room: int) -> None:
        self.room = room
        self.batch = NOTHING
        """The rows of the table."""
        self.rows: list[ScheduledRow] = []
        """All other rows."""
        self.copies: list[list[Copy]] = [[] for _ in range(kv_groups)]
        self.admitted: list[SequenceGroup] = []
        self.preempted: list[SequenceGroup] = []
        self.held_back: set[str] = set()
        """Tenants with groups that wait for blocks of their shares."""
        self._sources: list[tuple[BlockPool, int, int]] = []

    def detach(self, i: int, table: BlockTable) -> None:
        """Give a table of KV cache group `i` its own copy of a last block that it shares. The source stays
        referenced until the step is planned.
        """
        for copy in detach([table], drop=False):
            self.copies[i].append(copy)
            self._sources.append((table.pool, copy.source, table.stamp))

    def keep_named(self, i: int, rows: Steps) -> None:
        """Give tables of KV cache group `i` whose next tokens replace what others find a copy to write in, as
        far as the pool has blocks beyond those that the rows need.
        """
        tables = [sequence.tables[i] for sequence, _ in rows]
        counts = [count for _, count in rows]
        for table in tables:
            named = table.copies_next and table.blocks[-1] in table.pool.names
            if named and table.pool.available > blocks_needed(tables, counts):
                self.detach(i, table)

    def plan(self, swaps: Swaps) -> StepPlan:
        """The step as a value."""
        for pool, source, stamp in self._sources:
            pool.drop(source, stamp)
        copies = tuple(tuple(copies) for copies in self.copies)
        batch = self.batch.followed_by(self.rows) if self.rows else self.batch
        return StepPlan(batch, copies, swaps, tuple(self.admitted), tuple(self.preempted), True)


def to_sample(sequence: TokenSequence, count: int) -> tuple[TokenSequence, ...]:
    """The sequences that are sampled after this row: none if tokens are left, all of the group's before it is
    forked.
    """
    if sequence.computed + count < sequence.length:
        return ()
    return (sequence,) if sequence.group.forked else tuple(sequence.group.sequences)


def share(groups: Sequence[SequenceGroup], room: int) -> list[Steps]:
    """Divide `room` tokens: each decoding sequence gets its one token, prompts get what is left."""
    found = []
    decoding = [group.decoding for group in groups]
    owed = sum([len(group.sequences) for group, each in zip(groups, decoding, strict=True) if each])
    for group, each in zip(groups, decoding, strict=True):
        if each:
            owed -= len(group.sequences)
            steps = [(one, 1) for one in group.sequences if not one.waits and not one.complete]
        else:
            steps = group.advance(room - owed)
        room -= sum([count for _, count in steps])
        if steps:
            found.append(steps)
    return found


def fit(
    kv_groups: Iterable[KVCacheGroup],
    several: Sequence[Steps],
    extra: Sequence[int] = (),
    tenants: Collection[str] = (),
) -> bool:
    """True if every pool has the blocks for these steps and `extra` more, of the first groups. Blocks that a
    window has passed are freed first (C10). tenants: those whose steps they are, if other tenants keep
    their shares (C43).
    """
    for i, kv_group in enumerate(kv_groups):
        own = extra[i] if i < len(extra) else 0
        every = [([sequence.tables[i] for sequence, _ in steps], steps) for steps in several]
        if kv_group.kind.releases:
            for tables, _ in every:
                for table in tables:
                    kv_group.kind.release(table)
        pool = kv_group.pool
        available = pool.available - max((pool.shares(each).reserved() for each in tenants), default=0)
        most = own + sum([count // pool.block_size + 2 for steps in several for _, count in steps])
        if kv_group.kind.grows and most <= available:
            continue  # an upper bound fits, so an exact count is unnecessary
        need = sum(
            blocks_needed(tables, [sequence.growth(i, count) for sequence, count in steps])
            for tables, steps in every
        )
        if own + need > available:
            return False
    return True
