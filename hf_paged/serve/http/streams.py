"""Server-sent events, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

ALIVE = b": alive\n\n"
DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    """A value as an event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _until_gone(receive: Receive, gone: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()


@contextmanager
def noticing(receive: Receive, gone: Callable[[], None]) -> Iterator[None]:
    """Call `gone` if the client leaves within the block. The request's body must have been read."""
    task = asyncio.ensure_future(_until_gone(receive, gone))
    try:
        yield
    finally:
        task.cancel()


class EventStream(Response):
    """A stream of events. A client that leaves is noticed at once."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        gone: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        """gone: called when the client has left. end: called at last, whatever happened."""
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._chunks = chunks
        self._gone = gone
        self._end = end

    def init_headers(self, headers: Any = None) -> None:
        """As Response does, without a length."""
        pairs = {"content-type": "text/event-stream; charset=utf-8", **(headers or {})}
        self.raw_headers = [(name.encode(), value.encode()) for name, value in pairs.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with noticing(receive, self._gone):
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except OSError:  # the client left while something was sent
                self._gone()
            finally:
                self._end()
