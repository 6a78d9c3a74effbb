"""hf_paged.model.ranks.connections: messages of rank 0, and the end of a process at once (C42)."""

from __future__ import annotations

import signal
import socket
import threading
import time
from typing import Any

import pytest
from processes import LIMIT

from hf_paged.model.ranks.connections import Connections

SIZE = 3


def _connected() -> dict[int, Connections]:
    """Three ranks, as threads that meet as ranks do."""
    meeting = threading.Barrier(SIZE, timeout=LIMIT)
    values: list[Any] = [None] * SIZE
    found: dict[int, Connections] = {}

    def join(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            meeting.wait()
            met = list(values)
            meeting.wait()
            return met

        found[rank] = Connections(rank, gather)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(SIZE)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def _closed(connections: Connections) -> list[int]:
    end = time.monotonic() + LIMIT
    found: list[int] = []
    while not found and time.monotonic() < end:
        found = connections.closed()
    return found


def test_rank_0_knows_who_has_ended() -> None:
    ranks = _connected()
    assert ranks[0].closed() == []
    ranks[2].close()
    assert _closed(ranks[0]) == [2]
    assert ranks[0].closed() == []  # named once
    assert ranks[1].closed() == []
    ranks[0].close()
    assert _closed(ranks[1]) == [0]
    ranks[1].close()
    ranks[1].close()


def test_messages_wait_until_they_are_read() -> None:
    """Rank 0 waits for nobody; what it sent before its end is read, and looking for its end takes nothing."""
    ranks = _connected()
    assert all(each.complete for each in ranks.values())
    sent = [b"", b"one", bytes(range(256)) * 40]
    for message in sent:
        ranks[0].send(message)
    ranks[0].close()
    for rank in (1, 2):
        assert ranks[rank].closed() == []  # there is something to read
        assert [ranks[rank].receive() for _ in sent] == sent
        with pytest.raises(ConnectionResetError, match="the other rank"):
            ranks[rank].receive()
        assert _closed(ranks[rank]) == [0]
        ranks[rank].close()


def test_votes_of_all_ranks() -> None:
    """Each has the smallest of every number; a rank that has ended ends the vote of rank 0, and that all."""
    ranks = _connected()
    found: dict[int, Any] = {rank: [] for rank in ranks}

    def vote(rank: int) -> None:
        try:
            for turn in range(50):
                found[rank].append(ranks[rank].smallest([turn * rank, -rank, (turn + rank) % SIZE, 2**40]))
            if rank != 2:
                ranks[rank].smallest([1])
        except OSError as error:
            found[rank].append(error)
        ranks[rank].close()

    threads = [threading.Thread(target=vote, args=(rank,)) for rank in ranks]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LIMIT)
    for rank in ranks:
        assert found[rank][:50] == [[0, -2, 0, 2**40]] * 50
        assert [type(each) for each in found[rank][50:]] == [ConnectionResetError] * (rank != 2)


@pytest.mark.parametrize("waiting", ["for a message", "for a rank that reads nothing"])
def test_who_waits_is_let_go(waiting: str) -> None:
    ranks = _connected()
    rank = 1 if waiting == "for a message" else 0
    trouble: list[OSError] = []

    def wait() -> None:
        try:
            if rank:
                ranks[rank].receive()
            else:
                ranks[rank].send(bytes(2**26))
        except OSError as error:
            trouble.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    ranks[rank].shut()
    thread.join(LIMIT)
    assert trouble
    for each in ranks.values():
        each.close()


def test_a_signal_in_the_middle_of_a_message_takes_nothing_of_it() -> None:
    """A handler of the user's (a timer, a child that has ended) runs while a rank waits for the rest."""
    ranks = _connected()
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    message = bytes(range(256)) * 2**16
    others = [threading.Thread(target=ranks[0].send, args=(message,), daemon=True)]
    others.append(threading.Thread(target=ranks[2].receive, daemon=True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        for each in others:
            each.start()
        assert ranks[1].receive() == message
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard
    for each in others:
        each.join(LIMIT)
    for rank in ranks.values():
        rank.close()


@pytest.mark.parametrize("says", [b"", b"x", bytes(20), None])
def test_a_stranger_that_connects_first(says: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing, a part, another key, or has gone: the ranks are connected nevertheless."""
    monkeypatch.setattr("hf_paged.model.ranks.connections.HELLO", 0.2)
    make, strangers = socket.create_server, []

    def listen(*given: Any, **options: Any) -> socket.socket:
        server = make(*given, **options)
        strangers.append(socket.create_connection(("127.0.0.1", server.getsockname()[1])))
        if says is None:
            strangers[-1].close()
        else:
            strangers[-1].sendall(says)
        return server

    monkeypatch.setattr(socket, "create_server", listen)
    ranks = _connected()
    assert all(each.complete for each in ranks.values())
    ranks[0].send(b"one")
    assert [ranks[rank].receive() for rank in (1, 2)] == [b"one", b"one"]
    for each in (*strangers, *ranks.values()):
        each.close()


def test_a_rank_that_has_reached_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of one name, where another program listens at this port: no rank counts on connections."""
    connect = socket.create_connection
    with socket.create_server(("", 0)) as other:
        places = iter([other.getsockname()[1]])

        def reach(address: tuple[str, int], seconds: float) -> socket.socket:
            return connect((address[0], next(places, address[1])), seconds)

        monkeypatch.setattr(socket, "create_connection", reach)
        monkeypatch.setattr("hf_paged.model.ranks.connections.SECONDS", 0.5)
        ranks = _connected()
        assert not any(each.complete for each in ranks.values())
        for each in ranks.values():
            each.close()
