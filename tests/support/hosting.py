"""An engine that is served, without a server: the engine's end of its connection, and what it writes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from processes import LIMIT

from hf_paged import Engine, demo
from hf_paged.serve.link.engine_host import EngineHost
from hf_paged.serve.link.wire import News, first_message, messages


@contextmanager
def hosted(sent: int | None = None, **options: Any) -> Iterator[tuple[Engine, socket.socket]]:
    """An engine of the demo model, and the server's end of its connection. sent: bytes that may wait there."""
    engine = Engine(demo.model(), **{"block_size": 8, "num_blocks": 600, **options})
    ours, theirs = socket.socketpair()
    if sent is not None:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sent)
    thread = threading.Thread(target=EngineHost(engine, demo.tokenizer(), theirs).run)
    thread.start()
    try:
        assert first_message(ours).longest == engine.longest
        yield engine, ours
    finally:
        with ours:
            ours.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT)
    assert not thread.is_alive()
    assert engine.closed


def news(connection: socket.socket) -> Iterator[News]:
    """The messages that the engine's side writes."""
    connection.settimeout(60)
    yield from messages(connection)
