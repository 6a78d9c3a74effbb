"""Writes down what an engine does, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ..scheduling import ScheduledRow, Scheduler, StepPlan
from ..trace import BlockMap, Ended, Step, Trace, Writer
from .outputs.output import FinishReason
from .recorded import RecordedScheduler

logger = logging.getLogger("hf_paged")

SHARE = 0.01
"""The most of the engine's time that a live record may take."""


class Recorder:
    """A trace that is being written, or reported while it happens: a context manager, or `close()` it.

    The engine reports its steps to it. In a file a record shows the tables as the forward of its step sees
    them, and the requests that ended before the next one. A live one has a record at most every so many
    seconds, for all steps since the last one, and is late where it would take more than SHARE of the time.
    """

    def __init__(
        self,
        sink: Writer | Callable[[Step], None],
        scheduler: Scheduler,
        header: Trace,
        lock: AbstractContextManager[Any],
        every: float | None = None,
    ) -> None:
        """sink: writes the records, or is called with each of a live one. every: the least seconds between
        two records of a live one; None writes down every step.
        """
        self.header = header
        self.closed = False
        self.live = every is not None
        self.seconds = 0.0
        """Time that its records have taken from the threads that drive the engine."""
        self._every = every or 0.0
        self._due = 0.0
        self._lock = lock
        self._sink = sink
        self._writer = sink if isinstance(sink, Writer) else None
        self._count = 0
        self._begin = time.monotonic()
        self._recorded = RecordedScheduler(scheduler)
        self._step: Step | None = None
        """The last step, until it is known what ended in it."""
        self._ended: list[Ended] = []
        self._stale = False
        """True if something has happened since the last record."""
        self._error: Exception | None = None
        self._record(())

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._count - (self._step is not None)} records"
        return f"Recorder({self._writer or 'live'}, {state})"

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *trouble: object) -> None:
        self.close()

    # ---- reports of the engine

    def planned(self, plan: StepPlan) -> None:
        """A step is about to run."""
        if self.closed:
            return
        self._recorded.planned(plan)
        self._stale = True
        if time.monotonic() >= self._due:
            self._record(plan.rows)

    def rest(self) -> None:
        """There is nothing left to do for now: what a live one has not reported yet is due."""
        if self.live and self._stale and not self.closed:
            self._record(())

    def ended(self, number: int, reason: FinishReason) -> None:
        """A request has ended."""
        if not self.closed:
            self._ended.append(Ended(number, reason))
            self._stale = True

    def close(self) -> None:
        """End the trace. Twice is once; OSError if it could not be written. A live one has only logged it."""
        with self._lock:
            if self.closed:
                return
            self._write()
            self.closed = True
            self._recorded.close()
            if self._error is None and self._writer is not None:
                try:
                    self._writer.close()
                except OSError as error:
                    self._fail(error)
            if self._error is not None and not self.live:
                raise self._error

    def _record(self, rows: Sequence[ScheduledRow]) -> None:
        begin = time.thread_time()
        self._write()
        self._step = self._recorded.step(self._count, time.monotonic() - self._begin, rows)
        self._count += 1
        self._stale = False
        if self.live:
            self._write()
            spent = time.thread_time() - begin
            self.seconds += spent
            self._due = time.monotonic() + max(self._every, spent / SHARE)

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
            write = self._sink.write if isinstance(self._sink, Writer) else self._sink
            write(step)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        logger.warning("the trace %s can no longer be written: %s", self._writer or "live", error)
        self._error = error
        if self._writer is not None:
            self._writer.abandon()


def block_map(scheduler: Scheduler, header: Trace) -> BlockMap:
    """The blocks as they are between two steps."""
    recorded = RecordedScheduler(scheduler)
    try:
        return replace(header, steps=(recorded.step(0, 0.0, ()),)).map()
    finally:
        recorded.close()
