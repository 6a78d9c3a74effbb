"""From the engine's thread to the event loop: one wake-up of the loop for all news of a step."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress


class Mailbox:
    """Events that the engine's thread wants set in the event loop.

    Neither side waits for the other: the thread appends and returns, the loop sets all events that are there.
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
        while self._events:
            self._events.popleft().set()
