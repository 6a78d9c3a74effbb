"""Nonsense in bodies, headers and bytes is answered with 4xx, and the server goes on."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serving import Served, events, generated, serving, text

from hf_paged.serve.openai.protocol import NEUTRAL, ChatRequest, CompletionRequest

JSON = {"content-type": "application/json"}
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, -1e-308, 2**31, 2**63, -(2**63), 2**100, "", "a", "\u0000", "\ud83d\ude00",
    "x" * 300, [], [0], [1, 2, 3], ["a", 1], [[1]], [[[]]], {}, {"a": 1}, {"1": 1.5}, {"type": "text"}, [None], "null", "1",
    {"role": "user", "content": "a"}, [{"role": "user", "content": "a"}], [{"role": "\u00e9", "content": []}],
    [1] * 20_000, ["a"] * 20_000, [{}] * 20_000, [[]] * 20_000, {str(i): "a" for i in range(20_000)}, "x" * 200_000,
]  # fmt: skip
PATHS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(limits={"n": 4, "body_seconds": 0.5}) as made:
        yield made
        assert made.client.get("/health").status_code == 200
        assert made.complete(max_tokens=8)["choices"][0]["text"] == text(
            generated("The fox", max_new_tokens=8)[0]
        )


def test_random_bodies(served: Served) -> None:
    """Fields with values of all kinds: answered or refused, never a failure."""
    rng = random.Random(5)
    statuses = set()
    for _ in range(400):
        path, kind = rng.choice(list(PATHS.items()))
        names = [*kind.model_fields, *NEUTRAL, "zzz", ""]
        body: dict[str, Any] = {"max_tokens": 2}
        if rng.random() < 0.7:
            body |= (
                {"prompt": "a"}
                if kind is CompletionRequest
                else {"messages": [{"role": "user", "content": "a"}]}
            )
        for name in rng.sample(names, rng.randint(1, 3)):
            body[name] = rng.choice(ODD)
        body["max_tokens"] = body["max_tokens"] or 3
        response = served.client.post(path, content=json.dumps(body), headers=JSON)
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 404, 413), (body, response.text)
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"]
            assert error["type"] in ("invalid_request_error", "not_found_error")
        elif body.get("stream") is True:
            assert not any("error" in each for each in events(response.text)), body
    assert {200, 400} <= statuses


FORMS: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"], "items": {"type": "null"}}}},
    "structured_outputs": {"json": {"anyOf": [{"type": "string", "pattern": "a+", "maxLength": 3}, {"$ref": "#"}]}, "whitespace_pattern": " ?"},
    "guided_choice": ["a", "b"],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "1"}],
}  # fmt: skip


def mutated(value: Any, rng: random.Random) -> Any:
    """A value with something odd somewhere within it."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        act = rng.random()
        if act < 0.1:
            return {key: each for key, each in value.items() if key != name}
        if act < 0.2:
            return {**value, rng.choice(["zzz", "", "not", "$ref", "pattern", "allOf"]): rng.choice(ODD)}
        return {**value, name: mutated(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], mutated(value[place], rng), *value[place + 1 :]]
    return rng.choice(ODD)


def test_odd_forms_and_tools(served: Served) -> None:
    """Something odd deep in a schema, a tool or a message: answered or refused, and never a failure."""
    pytest.importorskip("llguidance")
    rng = random.Random(11)
    statuses = set()
    for _ in range(300):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 3,
            "temperature": 1.0,
        }
        for name in rng.sample(list(FORMS), rng.randint(1, 2)):
            body[name] = mutated(FORMS[name], rng) if rng.random() < 0.8 else FORMS[name]
        if "tools" in body and "tool_choice" not in body:
            body["tool_choice"] = "required"
        response = served.client.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 413), (body, response.text)
        if response.status_code != 200:
            assert response.json()["error"]["message"]
    assert {200, 400} <= statuses


NUMBERS = ["1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1e-400", "9" * 500, "-0", "0e0"]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_are_none(served: Served, number: str) -> None:
    """In place of every number of a request."""
    for path, kind in PATHS.items():
        for name in kind.model_fields:
            asked = (
                {"prompt": "a"}
                if kind is CompletionRequest
                else {"messages": [{"role": "user", "content": "a"}]}
            )
            body = json.dumps({"max_tokens": 2, **asked, name: "@"})
            response = served.client.post(path, content=body.replace('"@"', number), headers=JSON)
            assert response.status_code in (200, 400, 404, 413), (name, response.text)


def test_broken_bytes_in_bodies(served: Served) -> None:
    rng = random.Random(6)
    whole = json.dumps(
        {"prompt": "The fox \u20ac", "max_tokens": 2, "stop": ["a"], "logit_bias": {"5": 1.5}}
    ).encode()
    for _ in range(200):
        body = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(body))
            act = rng.randrange(3)
            if act == 0:
                body[place] = rng.randrange(256)
            elif act == 1:
                del body[place]
            else:
                body[place:place] = bytes(rng.randrange(256) for _ in range(3))
        response = served.client.post(
            rng.choice([*PATHS, "/tokenize", "/detokenize"]), content=bytes(body), headers=JSON
        )
        assert response.status_code in (200, 400, 404), (bytes(body), response.text)


def test_odd_headers(served: Served) -> None:
    rng = random.Random(7)
    names = ["authorization", "host", "origin", "x-request-id", "content-type", "content-length", "accept", "expect",
             "transfer-encoding", "cookie", "referer", "x-forwarded-for", "connection", "\u00ff"]  # fmt: skip
    odd = ["", " ", "a" * 5000, "a" * 300_000, "\u00ff\u00fe", "Bearer", "Bearer \u00e9", "[::1", "http://[", "chunked", "-1", "1e9", "99999999999999999999",
           "application/json; charset=nonsense", "localhost:99999999", "a,b", "%00", "100-continue"]  # fmt: skip
    for _ in range(120):
        head = {rng.choice(names): rng.choice(odd) for _ in range(rng.randint(1, 3))}
        raw = b"POST /v1/completions HTTP/1.1\r\n"
        lines = {"host": "localhost", "content-type": "application/json", "content-length": "2", **head}
        raw += b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in lines.items()) + b"\r\n{}"
        assert _status(served, raw) in {0, 100, 400, 401, 403, 404, 408, 413, 415, 431}, raw[:300]


def test_odd_paths(served: Served) -> None:
    """Errors of paths have OpenAI's form, too."""
    for path in (
        "/map/requests/x",
        "/map/requests/%00",
        "/v1/models/%ff",
        "/v1/models/a%2F..%2Fb",
        "/map/requests/" + "9" * 400,
    ):
        response = served.client.get(path)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["message"]


def test_odd_requests(served: Served) -> None:
    """Lines that are no HTTP, paths of all kinds, methods of all kinds."""
    for raw in (
        b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET //health/../metrics HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /v1/models/%00%0a HTTP/1.1\r\nhost: localhost\r\n\r\n", b"DELETE /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET http://other/health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    ):  # fmt: skip
        assert _status(served, raw) < 500, raw[:100]
    assert served.client.get("/health").status_code == 200


def _status(served: Served, raw: bytes) -> int:
    """The status of the answer to some bytes; 0 if the connection is closed or left without one."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=2) as connection:
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(4096)
        except OSError:
            return 0
    return int(answer.split()[1]) if answer.startswith(b"HTTP/") else 0
