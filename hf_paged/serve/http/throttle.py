"""Turns of the event loop: a short request is not held up by many."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
EVENTS = 16
"""Events that one turn sets. What each wakes up writes to a socket: a step of 256 streams in one turn would
hold up /health by all of them.
"""
BODIES = 4
"""Bodies and submissions of one turn. Each takes a millisecond or two: a thousand that arrive at once would
delay /health and all streams by all of them.
"""


class Turns:
    """Acts of which at most so many are done in one turn of the event loop, first come, first served."""

    def __init__(self, most: int, pause: float = 0.0) -> None:
        """pause: seconds between two such turns, in which the loop does what else is due."""
        self._most = most
        self._pause = pause
        self._acts: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def post(self, act: Callable[[], None]) -> None:
        """Have something done soon."""
        self._acts.append(act)
        self._schedule()

    async def take(self) -> None:
        """Wait for a place in a turn."""
        place = asyncio.get_running_loop().create_future()
        self.post(lambda: None if place.done() else place.set_result(None))
        await place

    def _schedule(self) -> None:
        if self._acts and not self._scheduled:
            self._scheduled = True
            loop = asyncio.get_running_loop()
            if self._pause:
                loop.call_later(self._pause, self._do)
            else:
                loop.call_soon(self._do)

    def _do(self) -> None:
        self._scheduled = False
        for _ in range(min(len(self._acts), self._most)):
            self._acts.popleft()()
        self._schedule()


async def aside(threads: ThreadPoolExecutor, act: Callable[[], T]) -> T:
    """The answer of `act`, which runs beside the event loop."""

    def run() -> T:
        try:
            return act()
        except StopIteration as error:  # asyncio's futures would never end with it
            raise RuntimeError("StopIteration was raised beside the event loop") from error

    return await asyncio.get_running_loop().run_in_executor(threads, run)
