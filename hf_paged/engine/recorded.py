"""An engine's scheduler as it was at the last record of a trace, and how it differs from that."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple, TypeVar

from ..blocks import BlockPool, Copy
from ..blocks.pool import CACHED
from ..scheduling import ScheduledBatch, ScheduledRow, Scheduler, SequenceGroup, Status, StepPlan
from ..trace import Arrival, Blocks, Change, Name, Row, Step

T = TypeVar("T")

CHANGED = re.compile(rb"[^\0]")
DIGITS = 4
"""Bytes of a digest that a record shows."""


class _RecordedTable(NamedTuple):
    """A table as it was at the last record."""

    released: int
    blocks: list[int]


class _CopiedBlock(NamedTuple):
    """A copy on write: from which block, for which request, and its place in the table."""

    source: int
    group: SequenceGroup
    position: int


class _RecordedPool:
    """One pool as it was at the last record."""

    def __init__(self, pool: BlockPool, host: BlockPool | None) -> None:
        self.pool = pool
        self.host = host
        self.states = bytes(pool.total)
        self.references: Counter[int] = Counter()
        """How many of the recorded tables name each block."""
        self.shared = 0
        self.copies: dict[int, _CopiedBlock] = {}
        """Copies on write since the last record, by their targets."""
        self.renamed: set[int] = set()
        self.evicted: set[int] = set()
        pool.names.logs.append(self)
        self._begun = False

    def change(self, old: _RecordedTable, released: int, blocks: list[int]) -> Change:
        """The change of a table, entered in the references."""
        rest = old.blocks[released - old.released :] if released >= old.released else []
        same = next(
            (i for i, (one, other) in enumerate(zip(rest, blocks, strict=False)) if one != other),
            min(len(rest), len(blocks)),
        )
        for block in old.blocks[: len(old.blocks) - len(rest)] + rest[same:]:
            self.references[block] -= 1
            self.shared -= self.references[block] == 1
        for block in blocks[same:]:
            self.references[block] += 1
            self.shared += self.references[block] == 2
        return Change(released, same, tuple(blocks[same:]))

    def caching(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The blocks that came into the cache since the last time, and those that left it."""
        before = self.states
        self.states = self.pool.states()
        if self.states == before:
            return (), ()
        # All at once, as two long numbers: a pool has tens of thousands of blocks, and few of them change in
        # a step.
        differ = (int.from_bytes(self.states, "big") ^ int.from_bytes(before, "big")).to_bytes(
            len(before), "big"
        )
        places = [found.start() for found in CHANGED.finditer(differ)]
        return tuple(i for i in places if self.states[i] == CACHED), tuple(
            i for i in places if before[i] == CACHED
        )

    def new_names(self) -> dict[int, str | None]:
        """The first digits of the digests of blocks that got another one since the last time."""
        names = self.pool.names.digests(sorted(self.renamed) if self._begun else None)
        self._begun = True
        self.renamed = set()
        return {block: None if digest is None else digest[:DIGITS].hex() for block, digest in names.items()}

    def new_evictions(self) -> tuple[int, ...]:
        """The blocks that were evicted since the last time."""
        blocks = self.evicted
        self.evicted = set()
        return tuple(sorted(blocks))

    def note_copies(self, place: int, copies: Sequence[Copy], batch: ScheduledBatch) -> None:
        """Enter the copies of a step, each with the request that writes to its target. place: of the pool
        among all.
        """
        sources = {copy.target: copy.source for copy in copies}
        for sequence, start in zip(batch.sequences, batch.starts, strict=True):
            position = start // self.pool.block_size
            target = sequence.tables[place].at(position)
            if target is not None and target in sources:
                self.copies[target] = _CopiedBlock(sources[target], sequence.group, position)

    def copied(self, place: int) -> tuple[tuple[int, int], ...]:
        """The copies since the last time whose targets are still what they were made for."""
        copies = self.copies
        self.copies = {}
        return tuple(
            (copy.source, target)
            for target, copy in copies.items()
            if any(sequence.tables[place].at(copy.position) == target for sequence in copy.group.sequences)
        )

    def close(self) -> None:
        """Have the pool note no more names."""
        self.pool.names.logs.remove(self)

    def blocks(self) -> Blocks:
        """How many there are of each state."""
        swapped = 0 if self.host is None else self.host.held
        return Blocks(self.pool.held, self.shared, self.pool.cached, self.pool.free, swapped)


class RecordedScheduler:
    """The scheduler and its pools as they were at the last record; a record has what changed since."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._kv_groups = [_RecordedPool(kv_group.pool, kv_group.host) for kv_group in scheduler.kv_groups]
        self._held: dict[Name, list[_RecordedTable]] = {}
        self._waiting: dict[Name, tuple[tuple[int, ...], ...]] = {}
        """The blocks of each sequence that waits on the host."""
        self._preemptions: dict[SequenceGroup, int] = {
            group: group.preemptions for group in scheduler.preempted + scheduler.running
        }
        self._states: dict[SequenceGroup, Status] = {}
        self._counts = dict(scheduler.counts)
        self._admitted: list[SequenceGroup] = []
        self._sampled = 0

    def planned(self, plan: StepPlan) -> None:
        """Note the parts of a plan that its step's tables do not show."""
        for i, copies in enumerate(plan.copies):
            if copies:
                self._kv_groups[i].note_copies(i, copies, plan.batch)
        self._admitted += plan.admitted
        self._sampled += len(plan.batch.sampled)

    def step(self, number: int, seconds: float, rows: Sequence[ScheduledRow]) -> Step:
        """The record of all that changed, but for the requests that end in it; from now on it is the last
        one. seconds: since the first.
        """
        scheduler = self._scheduler
        tables = self._changes()
        step = Step(
            number,
            seconds,
            tuple(
                Row(row.sequence.group.request.number, row.sequence.index, row.start, row.count)
                for row in rows
            ),
            tuple(group.request.number for group in self._admitted),
            self._preempted(),
            (),
            len(scheduler.waiting),
            len(scheduler.running),
            len(scheduler.preempted),
            tuple(kv_group.blocks() for kv_group in self._kv_groups),
            tables,
            tuple(kv_group.caching() for kv_group in self._kv_groups),
            self._arrived(),
            self._states_changed(),
            _unless_empty(kv_group.new_names() for kv_group in self._kv_groups),
            _unless_empty(kv_group.copied(i) for i, kv_group in enumerate(self._kv_groups)),
            _unless_empty(kv_group.new_evictions() for kv_group in self._kv_groups),
            self._host_changes(),
            self._counted(),
            self._sampled,
        )
        self._admitted = []
        self._sampled = 0
        return step

    def close(self) -> None:
        """Have the pools note no more names."""
        for kv_group in self._kv_groups:
            kv_group.close()

    # ---- what changed

    def _preempted(self) -> tuple[int, ...]:
        """The groups preempted since the last record, for whatever reason."""
        alive = {group: group.preemptions for group in self._scheduler.running + self._scheduler.preempted}
        before = self._preemptions
        self._preemptions = alive
        return tuple(group.request.number for group, times in alive.items() if times > before.get(group, 0))

    def _groups(self) -> list[SequenceGroup]:
        return [*self._scheduler.running, *self._scheduler.preempted, *self._scheduler.waiting]

    def _arrived(self) -> tuple[Arrival, ...]:
        """The requests that no record has shown yet, those that have ended meanwhile among them."""
        new = [group for group in (*self._admitted, *self._groups()) if group not in self._states]
        return tuple(
            Arrival(request.number, len(request.prompt), request.most_tokens, request.width)
            for request in (group.request for group in dict.fromkeys(new))
        )

    def _states_changed(self) -> dict[int, str]:
        """The state of each request in which it was not at the last record."""
        before = self._states
        self._states = {group: group.status for group in self._groups()}
        return {
            group.request.number: status.value
            for group, status in self._states.items()
            if before.get(group) is not status
        }

    def _counted(self) -> dict[str, int]:
        before = self._counts
        self._counts = dict(self._scheduler.counts)
        counts = {name: count - before.get(name, 0) for name, count in self._counts.items()}
        return {name: count for name, count in counts.items() if count}

    def _host_changes(self) -> dict[Name, tuple[tuple[int, ...], ...] | None]:
        """The sequences that came to wait on the host since the last record, and those that left it."""
        before = self._waiting
        self._waiting = {
            Name(group.request.number, sequence.index): tuple(
                tuple(table.blocks) for table in sequence.parked
            )
            for group in self._scheduler.preempted
            if group.swapped
            for sequence in group.sequences
        }
        changes: dict[Name, tuple[tuple[int, ...], ...] | None] = dict.fromkeys(
            before.keys() - self._waiting.keys()
        )
        changes.update({name: new for name, new in self._waiting.items() if before.get(name) != new})
        return changes

    def _changes(self) -> dict[Name, tuple[Change, ...] | None]:
        changes: dict[Name, tuple[Change, ...] | None] = {}
        running = [
            sequence
            for group in self._scheduler.running
            for sequence in group.sequences
            if sequence.tables[0].length
        ]
        names = [Name(sequence.group.request.number, sequence.index) for sequence in running]
        for name in self._held.keys() - set(names):  # first those that go: their blocks may be others' now
            for kv_group, held in zip(self._kv_groups, self._held.pop(name), strict=True):
                kv_group.change(held, 0, [])
            changes[name] = None
        for name, sequence in zip(names, running, strict=True):
            old = self._held.get(name)
            if old is not None and all(
                was == (table.released, table.blocks) for was, table in zip(old, sequence.tables, strict=True)
            ):
                continue
            changes[name] = tuple(
                kv_group.change(was, table.released, table.blocks)
                for kv_group, was, table in zip(
                    self._kv_groups, old or repeat(_RecordedTable(0, [])), sequence.tables, strict=False
                )
            )
            self._held[name] = [
                _RecordedTable(table.released, list(table.blocks)) for table in sequence.tables
            ]
        return changes


def _unless_empty(each: Iterable[T]) -> tuple[T, ...]:
    """Values by kind of layer; nothing if none has any."""
    found = tuple(each)
    return found if any(found) else ()
