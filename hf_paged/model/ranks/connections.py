"""Connections between ranks: rank 0's messages and votes of all travel on them, and they close when a process
ends, however it ends.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from array import array
from collections.abc import Callable, Sequence
from typing import Any

SECONDS = 10.0
"""How long a rank tries to reach rank 0."""
HELLO = 1.0
"""How long rank 0 waits for the first bytes of a peer that has connected."""
LENGTH = 4
"""Bytes before a message that say how long it is."""


class Connections:
    """One from every other rank to rank 0, on which rank 0 sends, or all of them vote.

    A message lies in the socket's buffer until its rank reads it, so that sending does not block. Where hosts
    cannot reach each other, or a rank has left a copy of itself (fork), a rank that has ended is noticed by
    what waits for it alone.
    """

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]], patience: float | None = None) -> None:
        """gather: the values of all ranks, for which they meet. patience: the seconds that a vote waits."""
        self._rank = rank
        self._of: dict[int, socket.socket] = {}
        """To each rank that this one is connected to."""
        self._named: set[int] = set()
        """Those whose connection has closed."""
        server = socket.create_server(("", 0), backlog=1024) if rank == 0 else None
        key = secrets.token_bytes(16)
        host = socket.gethostname()
        port = server.getsockname()[1] if server is not None else 0
        met = gather((host, port, key))
        host_0, port_0, key_0 = met[0]
        if server is None:
            with contextlib.suppress(OSError):
                here = "localhost" if host_0 == host else host_0
                own = socket.create_connection((here, port_0), SECONDS)
                own.sendall(key_0 + rank.to_bytes(4, "big"))
                self._of[0] = own
        connected = gather(bool(self._of))
        if server is not None:
            with server:
                self._accept(server, key, sum(connected))
        self.complete = gather(len(self._of))[0] == len(connected) - 1
        """True if all ranks are connected, as rank 0 knows: else none gets messages on them."""
        for own in self._of.values():
            own.settimeout(patience)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _accept(self, server: socket.socket, key: bytes, count: int) -> None:
        server.settimeout(SECONDS)
        with contextlib.suppress(OSError):
            while len(self._of) < count:
                own, _ = server.accept()
                own.settimeout(HELLO)
                with contextlib.suppress(OSError):  # it says nothing: it is no rank
                    words = _read(own, len(key) + 4)
                    if secrets.compare_digest(words[: len(key)], key):  # else of another group of ranks
                        self._of[int.from_bytes(words[len(key) :], "big")] = own
                        continue
                own.close()

    def send(self, message: bytes, seconds: float | None = None) -> None:
        """Send to all other ranks. It blocks only while a socket's buffer is full, so many seconds or until
        `shut`.
        """
        whole = len(message).to_bytes(LENGTH, "big") + message
        for own in self._of.values():
            own.settimeout(seconds)
            own.sendall(whole)

    def receive(self) -> bytes:
        """Rank 0's next message, whenever it comes."""
        return _read(self._of[0], int.from_bytes(_read(self._of[0], LENGTH), "big"))

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """For each number the smallest of all ranks'."""
        own = array("q", numbers)
        size = len(own) * own.itemsize
        if self._rank:
            self._of[0].sendall(own)
            return array("q", _read(self._of[0], size)).tolist()
        several = [array("q", _read(each, size)) for each in self._of.values()]
        found = array("q", map(min, own, *several))
        for each in self._of.values():
            each.sendall(found)
        return found.tolist()

    def closed(self) -> list[int]:
        """The ranks whose connection has closed. Each is named once."""
        ended = [rank for rank, own in self._of.items() if rank not in self._named and _is_closed(own)]
        self._named.update(ended)
        return ended

    def shut(self) -> None:
        """Let nothing wait here any more, in this thread or another."""
        for own in list(self._of.values()):
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this rank's. Twice is once."""
        for own in self._of.values():
            own.close()
        self._of = {}


def _read(connection: socket.socket, count: int) -> bytes:
    """So many bytes, in as many parts as they come: a signal or a timeout divides them."""
    found = bytearray(count)
    missing = memoryview(found)
    while missing:
        part = connection.recv_into(missing, 0, socket.MSG_WAITALL)
        if not part:
            raise ConnectionResetError("the other rank has closed its connection")
        missing = missing[part:]
    return bytes(found)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
