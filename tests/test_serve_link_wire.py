"""Messages that the processes of a server send each other."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi")

from processes import LIMIT

from hf_paged.serve.link.wire import frame, messages


def test_a_signal_that_another_thread_gets_is_handled_while_nothing_arrives() -> None:
    """SIGTERM begins the drain while answers stream and no client asks anything."""
    ours, theirs = socket.socketpair()
    handled: list[float] = []
    ended: list[float] = []
    seen = threading.Event()

    def handle(*_: object) -> None:
        handled.append(time.monotonic())
        seen.set()

    def other_thread() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        seen.wait(2)
        ended.append(time.monotonic())
        theirs.sendall(frame("last"))
        theirs.close()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        thread = threading.Thread(target=other_thread)
        thread.start()
        assert list(messages(ours)) == ["last"]
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
        ours.close()
    assert handled[0] < ended[0]


def test_messages_end_where_this_process_closes_the_connection() -> None:
    """As a benchmark does, which ends the server from another thread than the one that serves."""
    ours, theirs = socket.socketpair()
    with theirs:
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.extend(messages(ours)))
        thread.start()
        theirs.sendall(frame("first"))
        time.sleep(0.2)  # it waits for the next one
        ours.close()
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert found == ["first"]
