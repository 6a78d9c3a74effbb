"""The event loop and the engine's thread: neither is held up by the other, nor a short request by many."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

MOST_EVENTS = 16
"""Events that one turn of the event loop sets. What each wakes up writes to a socket, for which it gives the
interpreter's lock away: a step of 256 streams in one turn would hold up /health by all of them.
"""


class Mailbox:
    """Events that the engine's thread wants set in the event loop.

    Neither side waits for the other: the thread appends and returns, the loop sets the events that are there,
    some in each turn.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: deque[asyncio.Event] = deque()
        self._scheduled = False

    def open(self) -> None:
        """Deliver to the event loop that runs."""
        self._loop = asyncio.get_running_loop()

    def post(self, event: asyncio.Event) -> None:
        """Have an event set soon. Any thread may call it, in the middle of anything."""
        self._events.append(event)
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            with suppress(RuntimeError):  # the loop is closed, and no request waits there any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # In this order: an event that comes after it is delivered by another call.
        self._scheduled = False
        for _ in range(min(len(self._events), MOST_EVENTS)):
            self._events.popleft().set()
        if self._events and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._deliver)


class Turns:
    """At most so many bodies and submissions in one turn of the event loop, first come, first served.

    Each takes the loop a millisecond or two. Otherwise a thousand that arrive at once delay /health and
    all streams by all of them.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def take(self) -> None:
        """Wait for a place in this turn or a later one."""
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._renew, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _renew(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._most
        while self._left and self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._left -= 1
        self._scheduled = self._left < self._most
        if self._scheduled:
            loop.call_soon(self._renew, loop)
