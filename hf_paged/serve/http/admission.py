"""Which requests are let in, and which are under way: the bounded queue, and the drain."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from .errors import ApiError, unavailable

State = Literal["starting", "ready", "draining", "failed"]
SLACK = 0.2
"""The share of a drain's time that answers which were broken off have to reach their clients."""


class Cancellable(Protocol):
    """A request that is under way."""

    def cancel(self) -> None:
        """Break it off; its answers end with "abort"."""


class ByteBudget:
    """Bytes that all requests may hold together."""

    def __init__(self, most: int, what: str) -> None:
        """what: the bytes are, in the plural."""
        self.held = 0
        self._most = most
        self._what = what

    def take(self, size: int) -> None:
        """Hold so many more, or raise 429."""
        if self.held + size > self._most:
            raise ApiError(
                429,
                f"{self._what} have {self.held} bytes, the limit is {self._most}; try again in 5 s",
                code="queue_full",
                headers={"retry-after": "5"},
            )
        self.held += size

    def give(self, size: int) -> None:
        """Hold so many less."""
        self.held -= size


class QueueLimit:
    """How many engine requests are under way, and whether more are let in.

    They are counted from the body's arrival to the last byte of the answer, so prompts that are being
    tokenized and answers that are being read count, too.
    """

    def __init__(self, most: int, failed: Callable[[], bool], seconds: Callable[[], float]) -> None:
        """most: that may be under way at once. failed: whether the engine's thread has died. seconds: that a
        request takes on the average.
        """
        self.state: State = "starting"
        self.in_flight = 0
        self._most = most
        self._failed = failed
        self._seconds = seconds
        self._under_way: set[Cancellable] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def place(self, count: int) -> Iterator[None]:
        """Let `count` engine requests in until the block ends, or raise 429 or 503."""
        self.require_ready()
        if count > self._most:
            raise ApiError(
                400,
                f"{count} prompts are more than this server's queue holds ({self._most}); send fewer",
                "prompt",
            )
        if self.in_flight + count > self._most:
            wait = min(max(math.ceil(self._seconds()), 1), 30)
            raise ApiError(
                429,
                f"{self.in_flight} requests run or wait, the limit is {self._most}; try again in {wait} s",
                code="queue_full",
                headers={"retry-after": str(wait)},
            )
        self.in_flight += count
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= count
            if not self.in_flight:
                self._idle.set()

    def require_ready(self) -> None:
        """Raise 503 unless requests are served."""
        if self._failed() or self.state == "failed":
            raise unavailable(
                "the engine has stopped after an error; restart the server", 30, "engine_stopped"
            )
        if self.state == "starting":
            raise unavailable("the model is warming up; try again soon", 1, "starting")
        if self.state == "draining":
            raise unavailable("this server is shutting down; send the request to another one", 1, "draining")

    @contextmanager
    def under_way(self, request: Cancellable) -> Iterator[None]:
        """Have a request broken off if the drain's deadline passes."""
        self._under_way.add(request)
        try:
            yield
        finally:
            self._under_way.discard(request)

    async def drain(self, seconds: float) -> None:
        """Let no more in and wait for those under way, at most so long; towards the end the rest is broken
        off.
        """
        self.state = "draining"
        if await self._idle_within(seconds * (1 - SLACK)):
            return
        for request in list(self._under_way):
            request.cancel()
        await self._idle_within(max(seconds * SLACK, 1.0))

    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
