"""Connections that close when a process ends, however it ends: how ranks know at once that one is gone."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable
from typing import Any

SECONDS = 10.0
"""How long a rank tries to reach rank 0."""


class Connections:
    """One from every other rank to rank 0. Nothing is sent on them.

    Where hosts cannot reach each other, or a rank has left a copy of itself (fork), a rank that has ended is
    noticed by what waits for it alone.
    """

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        """gather: the values of all ranks, for which they meet."""
        self._of: dict[int, socket.socket] = {}
        """To each rank that this one is connected to."""
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

    def _accept(self, server: socket.socket, key: bytes, count: int) -> None:
        server.settimeout(SECONDS)
        with contextlib.suppress(OSError):
            while len(self._of) < count:
                own, _ = server.accept()
                own.settimeout(SECONDS)
                words = own.recv(len(key) + 4, socket.MSG_WAITALL)
                if not secrets.compare_digest(words[: len(key)], key):  # of another group of ranks
                    own.close()
                    continue
                self._of[int.from_bytes(words[len(key) :], "big")] = own

    def closed(self) -> list[int]:
        """The ranks whose connection has closed. Each is named once."""
        ended = [rank for rank, own in self._of.items() if _is_closed(own)]
        for rank in ended:
            self._of.pop(rank).close()
        return ended

    def close(self) -> None:
        """Close this rank's. Twice is once."""
        for own in self._of.values():
            own.close()
        self._of = {}


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
