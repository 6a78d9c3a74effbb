"""The server's side of its engine: requests out, and what is new of them, by way of a connection."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable
from typing import Any

from ...engine import Increment, TokenLogprob
from ...engine.outputs.output import NewTokens
from ...trace import Kind, Step
from ..http.errors import unavailable
from . import wire
from .model_facts import ModelFacts

Wake = Callable[[], None]
SILENT = 10.0
"""Seconds without news after which the engine's process counts as stuck. It has some every second."""


class CallError(Exception):
    """An error from a function of the engine's. kind: the type of its exception."""

    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(failure.message)
        self.kind = failure.kind
        self.refused = failure.refused

    @property
    def wrong(self) -> bool:
        """True if the arguments are at fault."""
        return self.refused or self.kind in ("ValueError", "TypeError", "OverflowError", "GrammarError")


class EngineRequest:
    """A request in the engine: its increments as they come, and its end."""

    def __init__(self, ticket: int, client: EngineClient, wake: Wake) -> None:
        self.number: int | None = None
        """Which request of the engine it is, as the map names it."""
        self.end: wire.End | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.wake = wake
        self._ticket = ticket
        self._client = client
        self._unread: list[Increment] = []

    def read(self) -> list[Increment]:
        """The increments since the last read."""
        found = self._unread
        self._unread = []
        return found

    def cancel(self) -> None:
        """End it at the engine's next step, with finish_reason "abort"."""
        if self.end is None:
            self._client.send(wire.Cancel(self._ticket))

    def add_token(self, index: int, token: int) -> None:
        """Take a token."""
        self._unread.append(Increment(index, [token], "", None))
        self.wake()

    def add(self, progress: wire.Progress) -> None:
        """Take what is new."""
        for new in progress.tokens:
            self._unread += _increments(new)
        if progress.prompt_logprobs is not None:
            self.prompt_logprobs = progress.prompt_logprobs
        self.end = progress.end
        self.wake()


class EngineClient(asyncio.Protocol):
    """An engine in another process, or in another thread of this one: the event loop alone uses it.

    The engine's side writes at most one message a step, so the loop is woken once for all requests.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Wait for the engine's facts; EOFError if it ends before."""
        found = wire.first_message(connection)
        assert isinstance(found, ModelFacts)
        self.facts = found
        self.driven = True
        """True while the engine computes."""
        self.on_signal: Callable[[int], None] = lambda number: None
        self.lost = False
        """True once the other side has closed the connection."""
        self._connection = connection
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._tickets = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._requests: dict[int, EngineRequest] = {}
        self._report: Callable[[list[Step], bool], None] = lambda steps, lag: None
        self._heard = time.monotonic()
        """When there was news."""

    @property
    def silent(self) -> bool:
        """True if the engine's process is stuck: stopped, or in a call that lets no other thread run."""
        return time.monotonic() - self._heard > SILENT

    async def open(self) -> None:
        """Read and write in the event loop that runs."""
        self._heard = time.monotonic()
        loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=self._connection)

    def close(self) -> None:
        """Close the connection: the engine's side ends what runs, and closes the engine."""
        if self._transport is not None:
            self._transport.close()

    def send(self, message: Any) -> None:
        """Send a message; nothing once the connection is closed."""
        if self._transport is not None and not self.lost:
            self._transport.write(wire.frame(message))

    # ---- requests

    async def submit(
        self, ids: tuple[int, ...], keywords: dict[str, Any], wake: Wake, each: bool
    ) -> EngineRequest:
        """A request that the engine has accepted; CallError if it has not. wake: called when there is
        something to read: with `each` after any step, else at the end, and when the engine has stopped.
        """
        ticket = next(self._tickets)
        request = EngineRequest(ticket, self, wake)
        self._requests[ticket] = request
        try:
            request.number = await self._answer(wire.Submit(ticket, ids, keywords, each))
        except BaseException:
            request.cancel()
            self._requests.pop(ticket, None)
            raise
        return request

    def forget(self, request: EngineRequest) -> None:
        """Wake the reader of a request no more."""
        request.wake = _nothing

    async def call(self, name: str, *arguments: Any) -> Any:
        """The result of a function of the engine's; CallError if it raises."""
        return await self._answer(wire.EngineCall(next(self._tickets), name, arguments))

    async def _answer(self, message: wire.Submit | wire.EngineCall) -> Any:
        if self.lost:
            raise unavailable("the engine's process has ended; restart the server", 30, "engine_stopped")
        future = asyncio.get_running_loop().create_future()
        self._calls[message.ticket] = future
        self.send(message)
        try:
            return await future
        finally:
            self._calls.pop(message.ticket, None)

    async def watch(
        self, report: Callable[[list[Step], bool], None]
    ) -> tuple[tuple[Kind, ...], dict[str, Any]]:
        """Have the map recorded, and `report` called with its steps from now on, and with whether the next
        ones are missing. The answer is its kinds of layers and the header of a trace.
        """
        self._report = report
        kinds, header = await self.call("watch")
        return kinds, header

    # ---- the connection

    def data_received(self, data: bytes) -> None:
        """Take what the engine's side has written."""
        self._heard = time.monotonic()
        self._received += data
        for message in wire.take_messages(self._received):
            assert isinstance(message, wire.News)
            self._take(message)

    def _take(self, news: wire.News) -> None:
        for answer in news.answers:
            self._take_answer(answer)
        tokens = iter(news.tokens)
        for ticket, index, token in zip(tokens, tokens, tokens, strict=True):
            request = self._requests.get(ticket)
            if request is not None:
                request.add_token(index, token)
        for progress in news.progress:
            request = self._requests.get(progress.ticket)
            if request is None:
                continue
            if progress.end is not None:
                del self._requests[progress.ticket]
            request.add(progress)
        if news.steps or news.lag:
            self._report(news.steps, news.lag)
        if not news.driven and self.driven:
            self._stop()
        for number in news.signals:
            self.on_signal(number)

    def _take_answer(self, answer: wire.CallResult) -> None:
        future = self._calls.get(answer.ticket)
        if future is None or future.done():
            return
        if answer.failure is not None:
            future.set_exception(CallError(answer.failure))
        else:
            future.set_result(answer.value)

    def _stop(self) -> None:
        """The engine computes no more: all who wait for it see to that."""
        self.driven = False
        for request in list(self._requests.values()):
            request.wake()

    def connection_lost(self, error: Exception | None) -> None:
        """The engine's process has ended, or this side has closed the connection."""
        self.lost = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(
                    unavailable("the engine's process has ended; restart the server", 30, "engine_stopped")
                )
        self._stop()


def _increments(new: NewTokens) -> list[Increment]:
    """New tokens as they are shown: each with a logprob also has its place in the text."""
    index, tokens, reason, notes = new
    if not notes:
        return [Increment(index, tokens, "", reason)]
    last = len(tokens) - 1
    return [
        Increment(index, [token], "", reason if i == last else None, [note])
        for i, (token, note) in enumerate(zip(tokens, notes, strict=True))
    ]


def _nothing() -> None:
    pass
