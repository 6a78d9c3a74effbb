"""Heads of requests that are too long or too slow, connections that ask nothing, answers that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serving import GUARD, Served, serving, until

from hf_paged.serve import connection
from hf_paged.serve.guard import Guard

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
    """All bytes until the server closes the connection."""
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
        while True:  # uvicorn closes after 5 s without a byte, of which some come all the time
            assert time.monotonic() - since < GUARD
            try:
                client.sendall(b"E")
                if client.recv(1 << 16) == b"":
                    break
            except TimeoutError:
                pass
            except ConnectionError:
                break


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


@pytest.mark.parametrize("size", [70_000, 120_000])
@pytest.mark.parametrize("where", ["header", "path", "body behind it"])
def test_a_long_head_in_one_piece_is_refused(served: Served, size: int, where: str) -> None:
    """The limit is of the head, whatever comes with it in one read."""
    head = {
        "header": BEGIN + b"x: " + b"a" * size + b"\r\n\r\n",
        "path": b"GET /" + b"a" * size + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "body behind it": b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\nx: "
        + b"a" * size
        + b"\r\n\r\n{}",
    }[where]
    with connect(served) as client:
        client.sendall(head)
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert "65536 bytes" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_head_below_the_limit_is_taken(served: Served) -> None:
    with connect(served) as client:
        client.sendall(
            BEGIN + b"authorization: Bearer red\r\nconnection: close\r\nx: " + b"a" * 60_000 + b"\r\n\r\n"
        )
        assert rest(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("text", [b"no HTTP at all\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"])
def test_what_is_no_http_gets_an_error_of_the_usual_form(served: Served, text: bytes) -> None:
    with connect(served) as client:
        client.sendall(text)
        head, _, body = rest(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_an_answer_that_the_end_of_the_server_breaks_off_says_so(served: Served) -> None:
    """A load of an adapter, say, that a drain does not wait for: 503 in the usual form, and no bare 500."""
    sent: list[Any] = []

    begun = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        guard = Guard(endless, served.service)
        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer red")]
        scope = {
            "type": "http",
            "path": "/v1/models",
            "method": "GET",
            "headers": headers,
            "query_string": b"",
        }
        task = asyncio.create_task(guard(scope, None, send))
        await begun.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(run())
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "shutting_down"
