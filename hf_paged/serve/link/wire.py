"""Messages between the process of the engine and the process of the server: values in frames."""

from __future__ import annotations

import pickle
import selectors
import socket
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...engine import Output, TokenLogprob
from ...engine.outputs.output import NewTokens
from ...trace import Step

HEAD = 8
"""Bytes of the length before each message."""
PIECE = 2**18
"""Bytes that are read at once."""
WAKE_SECONDS = 0.5
"""Between two looks for signals while nothing arrives."""


# ---- to the engine


class Submit(NamedTuple):
    """A request. ticket: by which answers name it. each: whether all tokens are news, not the end alone."""

    ticket: int
    ids: tuple[int, ...]
    keywords: dict[str, Any]
    each: bool


class Cancel(NamedTuple):
    """End a request."""

    ticket: int


class EngineCall(NamedTuple):
    """Call a function of the engine's."""

    ticket: int
    name: str
    arguments: tuple[Any, ...]


# ---- from the engine


class Failure(NamedTuple):
    """An exception by its type and its message. refused: of a request that could never fit."""

    kind: str
    message: str
    refused: bool = False

    @classmethod
    def of(cls, error: BaseException, refused: bool = False) -> Failure:
        """The failure that an exception is."""
        return cls(type(error).__name__, str(error), refused)


class CallResult(NamedTuple):
    """The outcome of a `Submit`, whose value is the request's number, or of an `EngineCall`."""

    ticket: int
    value: Any = None
    failure: Failure | None = None


class End(NamedTuple):
    """The end of a request: what the server uses of its output."""

    cached_tokens: int
    started: float | None
    first_token: float | None
    failure: Failure | None

    @classmethod
    def of(cls, output: Output) -> End:
        """The end by an output."""
        failure = None if output.error is None else Failure.of(output.error)
        return cls(output.cached_tokens, output.timing.started, output.timing.first_token, failure)


class Progress(NamedTuple):
    """Progress of a request. prompt_logprobs: once, before the first token. end: behind the last one."""

    ticket: int
    tokens: list[NewTokens]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    end: End | None = None


class News(NamedTuple):
    """All that is new since the last message: one message a step.

    answers come before what follows from them. tokens: of each request that has one new token and no other
    news, as most have, its ticket, the place of its answer, and the token. progress: of other requests. lag:
    whether steps of the map are missing behind these. driven: whether the engine computes. signals: that its
    process was sent.
    """

    answers: list[CallResult]
    tokens: array[int]
    progress: list[Progress]
    steps: list[Step]
    lag: bool
    driven: bool
    signals: list[int]


# ---- frames


def frame(message: Any) -> bytes:
    """A message as it is sent. Both ends are processes of one command, so it is pickled.

    News of 64 rows take 10 us so, both ends, and 1.5 by msgspec, which has no form for tokenizers, media and
    stats: two formats for 9 us of a step. multiprocessing.connection sends the same pickle in 21 us instead
    of 12, socket included, and no event loop can read it.
    """
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(HEAD, "big") + body


def take_messages(received: bytearray) -> Iterator[Any]:
    """The messages that are complete, cut off the front of the bytes that have arrived."""
    while len(received) >= HEAD:
        end = HEAD + int.from_bytes(received[:HEAD], "big")
        if len(received) < end:
            return
        message = bytes(received[HEAD:end])
        del received[:end]
        yield pickle.loads(message)


def messages(connection: socket.socket) -> Iterator[Any]:
    """The messages of a connection until the other end closes it.

    A signal that the system gives to another thread does not end this one's wait, and its handler in Python
    runs in the main thread alone: so no wait is long.
    """
    received = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        try:
            while True:
                if not selector.select(WAKE_SECONDS):
                    if connection.fileno() < 0:  # closed by this process
                        return
                    continue
                data = connection.recv(PIECE)
                if not data:
                    return
                received += data
                yield from take_messages(received)
        except ConnectionError:  # the other process was killed
            return


def first_message(connection: socket.socket) -> Any:
    """The next message, waited for, without any byte of those behind it; EOFError at the end."""
    return pickle.loads(_exactly(connection, int.from_bytes(_exactly(connection, HEAD), "big")))


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        data = connection.recv(count - len(found))
        if not data:
            raise EOFError("the other process has ended")
        found += data
    return bytes(found)
