"""A client's connection: heads of requests that are too long or too slow, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .guard import OPEN_PATHS
from .http.errors import ApiError, unavailable
from .openai.service import Service

HEAD_BYTES = 65536
"""Of a request's head, and of what else of it is no body."""
HEAD_SECONDS = 10.0
"""Until the head of a request is complete, from the connection or from its first byte."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection, bounded before anything is known about the client."""

    def __init__(self, *arguments: Any, service: Service, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._metrics = service.metrics
        self._limits = service.options.limits
        self._root_path = service.options.root_path
        self._received = 0
        """Bytes since the last complete head, part of a body, or end."""
        self._head_bytes = 0
        """Those of a head's names and values so far."""
        self._head: asyncio.TimerHandle | None = None
        """Closes the connection unless a head becomes complete."""
        self._unread: asyncio.TimerHandle | None = None
        """Looks whether the client has read anything."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1)  # so that `pause_writing` means: something is unread
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers(self._head, self._unread)
        super().connection_lost(exc)

    # ---- heads

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._received > HEAD_BYTES:
            self._refuse()
        elif self._head is None and self._idle:  # uvicorn's own timer has ended with these bytes
            self._expect_head()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + len(b": \r\n")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._received = 0
        self._cancel_timers(self._head)
        self._head = None
        path = self.url.partition(b"?")[0].decode("latin-1").removeprefix(self._root_path)
        full = len(self.tasks) >= self._limits.connections and path not in OPEN_PATHS
        self.app = _refuse_busy if full else self.config.loaded_app
        if self._head_bytes > HEAD_BYTES:  # which came in one piece
            self.app = _refuse_head
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._received = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._received = 0
        super().on_message_complete()

    @property
    def _idle(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _refuse(self) -> None:
        """End the connection, with an answer if none is under way."""
        if not self._idle:
            self.transport.abort()
            return
        self._end_with(_long_head(), "431 Request Header Fields Too Large")

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request in the form of all errors, and end the connection."""
        if self._head_bytes > HEAD_BYTES:  # the parser takes no longer path, either
            self._refuse()
            return
        self._end_with(ApiError(400, f"this is not a valid HTTP request: {msg}"), "400 Bad Request")

    def _end_with(self, error: ApiError, status: str) -> None:
        body = json.dumps(error.body).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    # ---- clients that do not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_timers(self._unread)

    def _watch(self, before: int | None = None) -> None:
        """Close the connection if as much is unread as before."""
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            self._metrics.slow_readers.add()
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(self._limits.write_seconds, self._watch, left)

    def _cancel_timers(self, *timers: asyncio.TimerHandle | None) -> None:
        for each in timers:
            if each is not None:
                each.cancel()


async def _refuse_busy(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer beyond --limit-connections."""
    error = unavailable("too many requests are being answered; try again soon", 1, "too_many_connections")
    await JSONResponse(error.body, error.status, headers=error.headers)(scope, receive, send)


def _long_head() -> ApiError:
    return ApiError(431, f"the head has more than {HEAD_BYTES} bytes; send fewer and shorter headers")


async def _refuse_head(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer to a head that is too long, behind which the connection ends."""
    error = _long_head()
    headers = {"connection": "close"}
    await JSONResponse(error.body, error.status, headers=headers)(scope, receive, send)
