"""A request, as its caller holds it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

from .driver import Driver
from .outputs.output import Increment, NewTokens, Output, TokenLogprob
from .outputs.queue import Wake
from .requests.job import Job


class Handle:
    """A request in the engine: wait for its `result()`, iterate over its increments as they come, or
    `cancel()` it.

    Waiting drives the engine, with all of its requests, unless the engine's own thread does. In a coroutine
    `await` it, or iterate with `async for`; a task that is cancelled meanwhile ends the request. Dropping a
    handle does not.
    """

    def __init__(self, job: Job, driver: Driver) -> None:
        self._job = job
        self._driver = driver

    def __repr__(self) -> str:
        state = (
            "done"
            if self.done
            else f"{sum(len(stream.tokens) for stream in self._job.streams)} tokens so far"
        )
        return f"Handle({state})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a handle belongs to its engine and cannot be pickled or copied; its result() can")

    @property
    def number(self) -> int | None:
        """Which request it is in the order of arrival, as a trace names it; None if it was refused."""
        return self._job.number

    @property
    def done(self) -> bool:
        """True once the output is there."""
        return self._job.output is not None

    def result(self, timeout: float | None = None) -> Output:
        """The output, once it is there. TimeoutError after `timeout` seconds; the request continues."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._job.output is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(
                    f"the request is not done after {timeout} seconds and continues; wait again or cancel()"
                )
            self._driver.drive_for(self._job, timeout=left)
        return self._job.output

    def cancel(self) -> None:
        """End the request, whatever its state, with finish_reason "abort". Its tokens so far stay. A second
        call does nothing.
        """
        self._driver.cancel(self._job)

    def read(self) -> list[Increment]:
        """The increments since the last read, without waiting for more: for callers that drive the engine by
        hand.
        """
        increments = self._job.queue.drain()
        self._see_to_trouble()
        return increments

    def read_tokens(self) -> list[NewTokens]:
        """As `read()`, without text and with all new tokens of an answer in one: for servers, which make the
        text elsewhere. A handle is read by one of the two.
        """
        return self._job.queue.drain_tokens()

    def watch(self, wake: Wake, each: bool = True) -> None:
        """Have `wake` called at the end of the request or of the engine's thread, and at `each` increment;
        `read()` has what is new. The thread starts if there is none.

        The thread calls it in the middle of a step, so it must neither wait nor raise. Call `read()` once
        after this: what came before is not announced.
        """
        self._driver.watch(self._job, wake, each)

    def unwatch(self, wake: Wake) -> None:
        """Call `wake` no more."""
        self._driver.unwatch(self._job, wake)

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Those of the output, as soon as the prompt is computed: before the first increment."""
        return None if self._job.prompt_scores is None else self._job.prompt_scores.notes

    @property
    def output(self) -> Output | None:
        """The output, if it is there; `result()` waits for it."""
        return self._job.output

    def _read_one(self) -> Increment | None:
        """The first unread increment: leaving a loop after it does not consume the following ones."""
        increment = self._job.queue.next()
        self._see_to_trouble()
        return increment

    def _see_to_trouble(self) -> None:
        if self._job.trouble is None or self.done:
            return
        interrupt = self._job.interrupt()
        self._driver.cancel(self._job)  # its tokenizer cannot read it: it ends, as the error that this is
        if interrupt is not None:
            raise interrupt

    def __iter__(self) -> Iterator[Increment]:
        """The increments since the last read, to the end of the request. A loop that is left can be continued
        by another.
        """
        while True:
            over = self.done  # read first: the last increment comes before the output
            while (increment := self._read_one()) is not None:
                yield increment
            if over:
                return
            if not self.done:
                self._driver.drive_for(self._job, each=True)

    def __await__(self) -> Generator[Any, None, Output]:
        return self._arrived().__await__()

    async def _arrived(self) -> Output:
        while self._job.output is None:
            await self._arrival(each=False)
        return self._job.output

    async def __aiter__(self) -> AsyncIterator[Increment]:
        """As __iter__, in a coroutine."""
        while True:
            over = self.done
            while (increment := self._read_one()) is not None:
                yield increment
            if over:
                return
            if not self.done:
                await self._arrival(each=True)

    async def _arrival(self, each: bool) -> None:
        try:
            await self._driver.arrival(self._job, each)
        except (asyncio.CancelledError, GeneratorExit):  # the waiting task is gone
            self.cancel()
            raise


def cancel_all(handles: list[Handle]) -> None:
    """Cancel requests; the next step ends those that an interrupt keeps this from ending."""
    for handle in handles:
        handle._job.cancelled = True
    for handle in handles:
        handle.cancel()
