"""Clients that leave, and clients that do not read, on real sockets."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serving import GUARD, Served, generated, serving, text, until

from hf_paged.serve.server import Server

LONG = {"prompt": "The fox", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """On a Unix socket, whose buffers are small."""
    path = Path(tempfile.gettempdir()) / f"{tmp_path_factory.mktemp('serve').name}-{time.monotonic_ns()}.sock"
    with serving(uds=str(path), limits={"write_seconds": 3.0, "body_seconds": 0.5}) as made:
        yield made
    assert not path.exists()


def test_a_socket_on_which_a_server_answers_is_not_taken(served: Served) -> None:
    with pytest.raises(ValueError, match="is the socket of a server that runs"):
        Server(served.service).run()
    assert served.client.get("/health").status_code == 200


def connect(served: Served, body: dict[str, Any] | None, length: int = 0) -> socket.socket:
    """A connection on which a request was sent; of a body of some length nothing, if none is given."""
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(GUARD)
    made.connect(str(served.service.options.uds))
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content) or length}\r\n\r\n"
    )
    made.sendall(head.encode() + content)
    return made


def idle(served: Served) -> bool:
    stats = served.engine.stats()
    return not (served.service.admission.in_flight or stats["running"] or stats["waiting"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(served: Served, stream: bool) -> None:
    """Its blocks are free long before its answer would have come, and its neighbour's tokens are its own."""
    before = served.engine.stats()["tokens"]
    connection = connect(served, {**LONG, "stream": stream})
    until(lambda: served.engine.stats()["running"] == 1)
    if stream:
        connection.recv(100)
    connection.close()
    assert served.complete("The owl", max_tokens=8)["choices"][0]["text"] == text(
        generated("The owl", max_new_tokens=8)[0]
    )
    until(lambda: idle(served))
    assert served.engine.stats()["tokens"] - before < 800


def test_clients_that_leave_at_once(served: Served) -> None:
    for wait in (0.0, 0.001, 0.005, 0.015, 0.019, 0.03):
        for stream in (False, True):
            connection = connect(served, {**LONG, "stream": stream, "prompt": ["The fox"] * 4})
            time.sleep(wait)
            connection.close()
    until(lambda: idle(served))
    assert served.client.get("/health").status_code == 200


def test_a_client_that_does_not_read_delays_no_other(served: Served) -> None:
    """The engine ends its request, others are answered, and later its connection is closed."""
    slow = connect(
        served, {**LONG, "stream": True, "n": 8, "temperature": 1, "logprobs": 20, "max_tokens": 150}
    )
    until(lambda: served.engine.stats()["running"] == 0 and served.service.admission.in_flight == 1)
    assert served.complete("The owl", max_tokens=8)["choices"][0]["text"]
    assert served.client.get("/health").status_code == 200
    until(lambda: idle(served))
    assert 'slow_readers_total{model_name="demo"} 1' in served.client.get("/metrics").text
    seen = b""
    while part := _received(slow):
        seen += part
    assert b"[DONE]" not in seen


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 20)
    except ConnectionError:
        return b""


def test_a_client_that_reads_late_gets_everything(served: Served) -> None:
    """Waiting pieces are joined to fewer and larger ones."""
    connection = connect(served, {**LONG, "stream": True, "max_tokens": 200})
    time.sleep(0.3)
    seen = b""
    while b"[DONE]" not in seen:
        seen += connection.recv(1 << 16)
    connection.close()
    data = [line[6:] for line in seen.split(b"\n") if line.startswith(b"data: {")]
    shown = "".join(json.loads(each)["choices"][0]["text"] for each in data)
    assert shown == served.complete(**{**LONG, "max_tokens": 200})["choices"][0]["text"]


def test_a_body_that_does_not_come(served: Served) -> None:
    connection = connect(served, None, length=100)
    assert b"408" in connection.recv(1000).split(b"\r\n")[0]
    connection.close()
    connect(served, None, length=100).close()
    assert served.client.get("/health").status_code == 200


def test_a_stream_without_news_says_that_it_is_alive(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments, which clients skip; none where tokens come."""
    from serving import events

    from hf_paged.serve.openai import generation

    assert (
        ": alive"
        not in served.post("/v1/completions", {**LONG, "stream": True, "max_tokens": 20, "echo": True}).text
    )
    monkeypatch.setattr(generation, "KEEP_ALIVE", 0.05)
    served.engine.pause()
    timer = threading.Timer(0.5, served.engine.resume)
    timer.start()
    body = served.post("/v1/completions", {**LONG, "stream": True, "max_tokens": 5}).text
    timer.join()
    assert body.count(": alive\n\n") >= 3
    assert len(events(body)) >= 1
