"""What a caller holds of a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from .job import Job
from .output import Increment, Output


class Handle:
    """A request in the engine: wait for its `result()`, iterate over its increments as they come, or `cancel()` it.

    Whoever waits drives the engine, everybody's requests with his own. Dropping a handle does not end its request.
    """

    def __init__(self, job: Job, drive: Callable[[Job], None], cancel: Callable[[Job], None]) -> None:
        self._job, self._drive, self._cancel = job, drive, cancel

    def __repr__(self) -> str:
        state = "done" if self.done else f"{sum(len(stream.tokens) for stream in self._job.streams)} tokens so far"
        return f"Handle({state})"

    @property
    def number(self) -> int | None:
        """Which request it is in the order of arrival, as a trace names it; None if it was refused."""
        return self._job.number

    @property
    def done(self) -> bool:
        """Whether the output is there."""
        return self._job.output is not None

    def result(self, timeout: float | None = None) -> Output:
        """The output, as soon as it is there; TimeoutError after `timeout` seconds, and the request goes on."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._job.output is None:
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"the request is not done after {timeout} seconds; it goes on, ask again or cancel() it")
            self._drive(self._job)
        return self._job.output

    def cancel(self) -> None:
        """End the request, whatever its state, with finish_reason "abort"; what it has said so far stays. Twice is once."""
        self._cancel(self._job)

    def read(self) -> list[Increment]:
        """What is new since the last time somebody looked, without waiting for more: for those who drive the engine by hand."""
        return [self._job.increments.popleft() for _ in range(len(self._job.increments))]

    def __iter__(self) -> Iterator[Increment]:
        """What is new since the last time somebody looked, to the end of the request."""
        while True:
            yield from self.read()
            if self._job.output is not None:
                return
            self._drive(self._job)
