"""An answer on its way to a client, which another replica can begin anew until its first token is out."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Message, Scope, Send

from ..serve.http.errors import ApiError
from ..serve.http.streams import ALIVE, DONE, event
from ..serve.openai.responses_format import failed

OF_RESPONSES = b"event: response."
"""How events of /v1/responses begin; those of chats and completions have no names."""
FAILED = (b'data: {"error":', OF_RESPONSES + b"failed\n")
"""How an event begins that ends a stream with an error: of chats and completions, of responses."""
OF_REPLICA = frozenset({"engine_stopped", "draining", "starting"})
"""Codes of errors that another replica would not answer with."""


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
        """True once the client has had a part of the answer: no other replica can continue it."""
        self._opened = False
        """True once the client has had status 200 of a stream."""
        self._opening = b""
        """The beginning of a replica's stream."""
        self._passed = b""
        """The events that the client had last."""
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
            said = _data(body.partition(b"\n\n")[0])
            _require_other(said.get("error") or {**said["response"]["error"], "code": said.get("code")})
        if not self._held and not last:  # the opening, which has no token
            self._held.append(body)
            self._opening = body
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
            with suppress(ValueError, KeyError, TypeError):
                _require_other(json.loads(body)["error"])
        self.streamed = True
        if self._opened:
            await self._pass(self._ending(json.loads(body)["error"]), True)
            return
        await self._send(self._start)
        await self._pass(body, True)

    async def fail(self, error: ApiError) -> None:
        """End the answer with an error, in the form in which it was begun."""
        if self._opened:
            await self._pass(self._ending(error.body["error"]), True)
        elif not self.streamed:
            self.streamed = True
            response = JSONResponse(error.body, error.status, headers=error.headers)
            await response(self._scope, _nothing, self._send)

    def _ending(self, error: dict[str, Any]) -> bytes:
        """The end of a stream by an error, in the form in which it began."""
        if not self._opening.startswith(OF_RESPONSES):
            return event({"error": error}) + DONE
        response = _latest(self._opening)["response"]
        number = _latest(self._passed)["sequence_number"] + 1 if self._passed else 0
        return failed(response, error["message"], error["code"], number)

    async def _open(self) -> None:
        if not self._opened:
            self._opened = True
            await self._send(self._start)

    async def _pass(self, body: bytes, last: bool) -> None:
        if body and body != ALIVE:
            self._passed = body
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})


def _require_other(error: dict[str, Any]) -> None:
    """Raise ReplicaFailed if the replica, not the request, caused an error."""
    if error.get("code") in OF_REPLICA:
        raise ReplicaFailed(error.get("message"))


def _latest(events: bytes) -> dict[str, Any]:
    """The data of the last of some events."""
    return _data(events.rstrip(b"\n").rpartition(b"\n\n")[2])


def _data(event: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event.rpartition(b"\n")[2].removeprefix(b"data: "))
    return found


def _is_stream(start: Message) -> bool:
    headers = {bytes(name).lower(): bytes(value) for name, value in start.get("headers", ())}
    return headers.get(b"content-type", b"").startswith(b"text/event-stream")


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
