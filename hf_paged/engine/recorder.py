"""Writes down what an engine does, step by step."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import repeat
from typing import Any, NamedTuple

from ..blocks import BlockPool
from ..blocks.pool import CACHED
from ..scheduling import Scheduler, SequenceGroup, StepPlan
from ..trace import Blocks, Change, Ended, Name, Row, Step, Trace, Writer
from .outputs.output import FinishReason

logger = logging.getLogger("hf_paged")

CHANGED = re.compile(rb"[^\0]")


class _RecordedTable(NamedTuple):
    """A table as it was at the last record."""

    released: int
    blocks: list[int]


class _RecordedPool:
    """One pool as it was at the last record."""

    def __init__(self, pool: BlockPool, host: BlockPool | None) -> None:
        self.pool = pool
        self.host = host
        self.states = bytes(pool.total)
        self.references: Counter[int] = Counter()
        """How many of the recorded tables name each block."""
        self.shared = 0

    def change(self, old: _RecordedTable, released: int, blocks: list[int]) -> Change:
        """What became of a table, entered in the references."""
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

    def blocks(self) -> Blocks:
        """How many there are of each state."""
        swapped = 0 if self.host is None else self.host.held
        return Blocks(self.pool.held, self.shared, self.pool.cached, self.pool.free, swapped)


class Recorder:
    """A trace that is being written: a context manager, or `close()` it.

    The engine reports its steps to it. A record shows the tables as the forward of its step sees them, and
    the requests that ended before the next one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        scheduler: Scheduler,
        header: Trace,
        lock: AbstractContextManager[Any],
    ) -> None:
        self.path = path
        self.closed = False
        self._scheduler = scheduler
        self._lock = lock
        self._writer = Writer(path, header)
        self._begin = time.monotonic()
        self._kv_groups = [_RecordedPool(kv_group.pool, kv_group.host) for kv_group in scheduler.kv_groups]
        self._held: dict[Name, list[_RecordedTable]] = {}
        self._preemptions: dict[SequenceGroup, int] = {
            group: group.preemptions for group in scheduler.preempted + scheduler.running
        }
        self._step: Step | None = None
        """The last step, until it is known what ended in it."""
        self._ended: list[Ended] = []
        self._error: OSError | None = None
        self.planned(StepPlan())

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._writer.count} records"
        return f"Recorder({os.fspath(self.path)!r}, {state})"

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *trouble: object) -> None:
        self.close()

    # ---- reports of the engine

    def planned(self, plan: StepPlan) -> None:
        """A step is about to run."""
        if self.closed:
            return
        self._write()
        scheduler = self._scheduler
        tables = self._changes()
        self._step = Step(
            self._writer.count,
            time.monotonic() - self._begin,
            tuple(
                Row(row.sequence.group.request.number, row.sequence.index, row.start, row.count)
                for row in plan.rows
            ),
            tuple(group.request.number for group in plan.admitted),
            self._preempted(),
            (),
            len(scheduler.waiting),
            len(scheduler.running),
            len(scheduler.preempted),
            tuple(kv_group.blocks() for kv_group in self._kv_groups),
            tables,
            tuple(kv_group.caching() for kv_group in self._kv_groups),
        )

    def ended(self, number: int, reason: FinishReason) -> None:
        """A request has ended."""
        if not self.closed:
            self._ended.append(Ended(number, reason))

    def close(self) -> None:
        """End the trace. Twice is once; OSError if it could not be written."""
        with self._lock:
            if self.closed:
                return
            self._write()
            self.closed = True
            if self._error is None:
                try:
                    self._writer.close()
                except OSError as error:
                    self._fail(error)
            if self._error is not None:
                raise self._error

    def _write(self) -> None:
        """Hand over the last step, with what has ended since. A disk that is full is no reason for a request
        to end.
        """
        if self._step is None or self._error is not None:
            return
        step = replace(self._step, ended=tuple(self._ended))
        self._step = None
        self._ended = []
        try:
            self._writer.write(step)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        logger.warning("the trace %s cannot be written any more: %s", os.fspath(self.path), error)
        self._error = error
        self._writer.abandon()

    # ---- what changed

    def _preempted(self) -> tuple[int, ...]:
        """The groups preempted since the last record, for whatever reason."""
        alive = {group: group.preemptions for group in self._scheduler.running + self._scheduler.preempted}
        before = self._preemptions
        self._preemptions = alive
        return tuple(group.request.number for group, times in alive.items() if times > before.get(group, 0))

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
