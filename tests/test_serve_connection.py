"""Heads of requests that are too long or too slow, connections that ask nothing, answers that nobody reads."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")

from serving import GUARD, Served, serving, until

from hf_paged.serve import connection

BEGIN = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
PART = b"2\r\n{}\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(limits={"write_seconds": 1.0, "connections": 3}, api_keys=("red",)) as made:
        yield made


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=GUARD)


def rest(of: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    seen = b""
    try:
        while part := of.recv(1 << 16):
            seen += part
    except ConnectionError:
        pass
    return seen


def send(to: socket.socket, begin: bytes, more: bytes, most: int) -> int:
    """Send until the server closes: how many bytes it took."""
    sent = 0
    try:
        to.sendall(begin)
        while sent < most:
            to.sendall(more)
            sent += len(more)
            time.sleep(0.001)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (BEGIN, b"x: " + b"a" * 1000 + b"\r\n"),
        (BEGIN + b"x: ", b"a" * 5000),
        (b"GET /", b"a" * 5000),
        (BEGIN + b"x" * 10, b"a" * 5000),
        (CHUNKED + PART + b"0\r\nx: ", b"a" * 5000),
        (CHUNKED + b"2;", b"a" * 5000),
    ],
    ids=["headers", "header", "path", "name", "trailer", "extension"],
)
def test_a_long_head_is_refused_without_a_key(served: Served, begin: bytes, more: bytes) -> None:
    with connect(served) as client:
        assert send(client, begin, more, 40_000_000) < 20_000_000
    assert served.client.get("/health").status_code == 200


def test_the_refusal_of_a_long_head_says_why(served: Served) -> None:
    with connect(served) as client:
        client.sendall(BEGIN + b"x: " + b"a" * 65_536)
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert "65536 bytes" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_long_head_that_is_allowed(served: Served) -> None:
    assert served.client.get("/v1/models", headers={"x": "a" * 60_000}).status_code == 200


@pytest.mark.parametrize("begin", [b"", b"GET", BEGIN], ids=["nothing", "line", "headers"])
def test_a_head_that_does_not_come(served: Served, begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a whole request, and while bytes trickle in."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    with connect(served) as client:
        client.sendall(begin)
        assert rest(client) == b""
    with connect(served) as client:
        client.sendall(BEGIN + b"\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 401")
        client.settimeout(0.05)
        since = time.monotonic()
        while time.monotonic() - since < 4:  # uvicorn closes after 5 s without a byte
            try:
                client.sendall(b"E")
                if client.recv(1 << 16) == b"":
                    break
            except TimeoutError:
                pass
            except ConnectionError:
                break
        assert time.monotonic() - since < 3


def test_idle_connections_take_nothing_from_others(served: Served) -> None:
    idle = [connect(served) for _ in range(10)]
    try:
        assert served.client.get("/health").status_code == 200
        assert served.complete(max_tokens=2)["choices"]
    finally:
        for each in idle:
            each.close()


def test_more_requests_than_allowed_are_503_and_health_is_not(served: Served) -> None:
    """Bodies that do not come keep requests under way."""
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer red\r\ncontent-type: application/json\r\ncontent-length: 5\r\n\r\n"
    open_ones = [connect(served) for _ in range(3)]
    for each in open_ones:
        each.sendall(head)
    try:
        until(lambda: len(served.server.server_state.tasks) == 3)
        response = served.client.get("/v1/models")
        assert response.status_code == 503
        error = response.json()["error"]
        assert error["code"] == "too_many_connections"
        assert served.client.get("/health").status_code == 200
    finally:
        for each in open_ones:
            each.close()
    until(lambda: served.client.get("/v1/models").status_code == 200)


def test_a_whole_answer_that_is_not_read_is_closed(served: Served) -> None:
    before = served.service.metrics.slow_readers.total
    body = json.dumps({"prompt": "a " * 600, "return_token_strs": True}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer red\r\ncontent-type: application/json\r\n"
    whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
    unread = connect(served)
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    unread.setblocking(False)
    left = memoryview(whole * 4000)

    def counted() -> bool:
        """While the connection takes more requests, their answers fill what holds them on the way."""
        nonlocal left
        with contextlib.suppress(OSError):
            while left:
                left = left[unread.send(left) :]
        return served.service.metrics.slow_readers.total == before + 1

    until(counted)
    unread.close()
    assert served.client.get("/health").status_code == 200
