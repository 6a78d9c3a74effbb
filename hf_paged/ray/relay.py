"""An answer on its way to a client, which another replica can begin anew until its first token is out."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Message, Scope, Send

from ..serve.errors import ApiError
from ..serve.streams import ALIVE, DONE, event

FAILED = b'data: {"error":'
"""How an event begins that ends a stream with an error."""
OF_REPLICA = frozenset({"engine_stopped", "draining", "starting"})
"""Codes of errors that another replica would not answer with."""


NUMBER = b"x-request-id"


class ReplicaFailed(Exception):
    """A replica could not answer, and its client has had nothing of it yet."""


class HeldAnswer:
    """The messages of a response. A client gets none of them while another replica could still answer in its
    place: the whole of a body, or the beginning of a stream to its first token. Comments that keep a stream
    alive pass.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.streamed = False
        """Whether the client has had a part of the answer: no other replica can continue it."""
        self._opened = False
        """Whether the client has had status 200 of a stream."""
        self.begin()

    def begin(self) -> None:
        """A replica answers from the beginning."""
        self._start: Message = {}
        self._held: list[bytes] = []

    async def take(self, message: Message) -> None:
        """Take a message of a replica; ReplicaFailed for an error that is the replica's own."""
        if message["type"] == "http.response.start":
            headers = [
                each for each in message["headers"] if each[0].lower() != b"x-request-id"
            ]  # Ray's proxy has it
            self._start = {**message, "headers": headers}
            return
        body = message.get("body", b"")
        last = not message.get("more_body", False)
        if self.streamed:
            await self._pass(body, last)
        elif self._start["status"] == 200 and _is_stream(self._start):
            await self._take_event(body, last)
        else:
            self._held.append(body)
            if last:
                await self._finish(b"".join(self._held))

    async def _take_event(self, body: bytes, last: bool) -> None:
        if body.startswith(FAILED):
            _require_other(body.removeprefix(b"data: ").partition(b"\n")[0])
        if not self._held and not last:  # the opening, which has no token
            self._held.append(body)
        elif body == ALIVE:
            await self._open()
            await self._pass(body, False)
        else:
            await self._open()
            self.streamed = True
            await self._pass(b"".join([*self._held, body]), last)

    async def _finish(self, body: bytes) -> None:
        """Send a response that is no stream; behind the status of a stream, as an event."""
        if self._start["status"] == 503:
            _require_other(body)
        self.streamed = True
        if self._opened:
            await self._pass(b"data: " + body + b"\n\n" + DONE, True)
            return
        await self._send(self._start)
        await self._pass(body, True)

    async def fail(self, error: ApiError) -> None:
        """End the answer with an error, in the form in which it was begun."""
        if self._opened:
            await self._pass(event(error.body) + DONE, True)
        elif not self.streamed:
            self.streamed = True
            response = JSONResponse(error.body, error.status, headers=error.headers)
            await response(self._scope, _nothing, self._send)

    async def _open(self) -> None:
        if not self._opened:
            self._opened = True
            await self._send(self._start)

    async def _pass(self, body: bytes, last: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})


def _require_other(body: bytes) -> None:
    """Raise ReplicaFailed if an error in OpenAI's form is of the replica and not of the request."""
    try:
        error: Any = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return
    if error.get("code") in OF_REPLICA:
        raise ReplicaFailed(error.get("message"))


def _is_stream(start: Message) -> bool:
    headers = {bytes(name).lower(): bytes(value) for name, value in start.get("headers", ())}
    return headers.get(b"content-type", b"").startswith(b"text/event-stream")


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
