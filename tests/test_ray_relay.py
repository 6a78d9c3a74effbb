"""Answers of a replica that are held until they can no longer begin anew on another (no ray here)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from hf_paged.ray.relay import HeldAnswer, ReplicaFailed
from hf_paged.serve.http.errors import unavailable
from hf_paged.serve.http.streams import ALIVE, DONE, event
from hf_paged.serve.openai.responses_format import failed


class Client:
    """The events that a client gets."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.ended = False

    async def send(self, message: Message) -> None:
        assert not self.ended
        if message["type"] == "http.response.start":
            assert not self.status
            self.status = message["status"]
        else:
            self.body += message["body"]
            self.ended = not message.get("more_body", False)


def start(status: int = 200, kind: bytes = b"text/event-stream") -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"Content-Type", kind)]}


def body(text: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


def held() -> tuple[Client, HeldAnswer]:
    client = Client()
    return client, HeldAnswer({"type": "http"}, client.send)


async def take(answer: HeldAnswer, *messages: Message) -> None:
    for each in messages:
        await answer.take(each)


def test_a_stream_is_held_to_its_first_token() -> None:
    client, answer = held()
    asyncio.run(take(answer, start(), body(b"opening ")))
    assert not client.status
    assert not answer.streamed
    answer.begin()  # the replica has died
    asyncio.run(take(answer, start(), body(b"opening "), body(b"token "), body(b"next "), body(b"", False)))
    assert (client.status, client.body, client.ended) == (200, b"opening token next ", True)


def test_comments_pass_and_the_answer_can_still_begin_anew() -> None:
    client, answer = held()
    asyncio.run(take(answer, start(), body(b"opening "), body(ALIVE)))
    assert (client.status, client.body, answer.streamed) == (200, ALIVE, False)
    answer.begin()
    asyncio.run(take(answer, start(), body(b"opening "), body(b"token "), body(b"", False)))
    assert client.body == ALIVE + b"opening token "


def test_a_whole_body_is_held_to_its_end() -> None:
    client, answer = held()
    asyncio.run(take(answer, start(kind=b"application/json"), body(b"half")))
    answer.begin()
    asyncio.run(take(answer, start(kind=b"application/json"), body(b"half "), body(b"whole", False)))
    assert (client.status, client.body, client.ended) == (200, b"half whole", True)


def test_an_error_behind_the_first_token_is_an_event() -> None:
    client, answer = held()
    asyncio.run(take(answer, start(), body(b"opening "), body(b"token ")))
    assert answer.streamed
    asyncio.run(answer.fail(unavailable("the replica has died", 1, "replica_died")))
    assert client.ended
    shown = client.body.removeprefix(b"opening token ")
    assert shown.endswith(DONE)
    assert json.loads(shown.removeprefix(b"data: ").partition(b"\n")[0])["error"]["code"] == "replica_died"


def test_an_error_before_it_is_a_body() -> None:
    client, answer = held()
    asyncio.run(answer.fail(unavailable("no replica", 1, "no_replica")))
    assert client.status == 503
    assert json.loads(client.body)["error"]["message"] == "no replica"


@pytest.mark.parametrize("code", ["engine_stopped", "draining"])
def test_errors_of_one_replica_are_left_to_another(code: str) -> None:
    error = json.dumps({"error": {"message": "stopped", "code": code}}).encode()
    client, answer = held()
    with pytest.raises(ReplicaFailed, match="stopped"):
        asyncio.run(take(answer, start(503, b"application/json"), body(error, False)))
    answer.begin()
    with pytest.raises(ReplicaFailed, match="stopped"):
        asyncio.run(take(answer, start(), body(b"opening"), body(b"data: " + error + b"\n\n")))
    assert not client.status


def test_errors_of_the_request_are_not() -> None:
    error = json.dumps({"error": {"message": "too long", "code": "context_length_exceeded"}}).encode()
    client, answer = held()
    asyncio.run(take(answer, start(400, b"application/json"), body(error, False)))
    assert (client.status, client.body) == (400, error)


def of_responses(*kinds: str, first: int = 0, **more: Any) -> bytes:
    """Events with their names and numbers."""
    found = []
    for number, kind in enumerate(kinds, first):
        said = {"type": kind, "response": {"id": "resp_1", "status": "in_progress"}, **more}
        found.append(f"event: {kind}\n".encode() + event({**said, "sequence_number": number}))
    return b"".join(found)


OPENING = of_responses("response.created", "response.in_progress")


def last_event(client: Client) -> dict[str, Any]:
    """The last event that a client has."""
    name, data = client.body.rstrip(b"\n").rpartition(b"\n\n")[2].split(b"\n")
    found: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: " + found["type"].encode()
    return found


def test_responses_end_by_an_error_in_their_own_form() -> None:
    """With the response as it began, and the number behind the last one that the client has."""
    client, answer = held()
    token = of_responses("response.output_text.delta", first=2, delta="data: \n\n")
    asyncio.run(take(answer, start(), body(OPENING), body(token), body(ALIVE)))
    asyncio.run(answer.fail(unavailable("the replica has died", 1, "replica_died")))
    assert client.ended
    assert DONE not in client.body
    ending = last_event(client)
    assert (ending["type"], ending["code"], ending["sequence_number"]) == (
        "response.failed", "replica_died", 3
    )  # fmt: skip
    assert ending["response"] == {
        "id": "resp_1", "status": "failed", "error": {"code": "server_error", "message": "the replica has died"}
    }  # fmt: skip


@pytest.mark.parametrize("code", ["engine_stopped", "draining"])
def test_responses_of_a_failed_replica_are_left_to_another(code: str) -> None:
    client, answer = held()
    ending = failed({"id": "resp_1"}, "stopped", code, 2)
    with pytest.raises(ReplicaFailed, match="stopped"):
        asyncio.run(take(answer, start(), body(OPENING), body(ending)))
    assert not client.status
    answer.begin()
    asyncio.run(take(answer, start(), body(OPENING), body(b"token", False)))
    assert client.body == OPENING + b"token"


def test_a_response_that_fails_by_itself_is_passed_on() -> None:
    client, answer = held()
    ending = failed({"id": "resp_1"}, "wrong", "timeout", 2)
    asyncio.run(take(answer, start(), body(OPENING), body(ending, False)))
    assert client.body == OPENING + ending


def test_a_refused_response_behind_a_comment_is_an_event() -> None:
    error = b'{"error":{"message":"too long","code":"context_length_exceeded"}}'
    client, answer = held()
    asyncio.run(take(answer, start(), body(OPENING), body(ALIVE)))
    answer.begin()
    asyncio.run(take(answer, start(400, b"application/json"), body(error, False)))
    ending = last_event(client)
    assert client.ended
    assert (ending["sequence_number"], ending["code"]) == (0, "context_length_exceeded")
    assert ending["response"]["error"]["message"] == "too long"


def test_a_refusal_behind_a_comment_is_an_event() -> None:
    error = b'{"error":{"message":"too long","code":null}}'
    client, answer = held()
    asyncio.run(take(answer, start(), body(b"opening"), body(ALIVE)))
    answer.begin()
    asyncio.run(take(answer, start(400, b"application/json"), body(error, False)))
    assert client.body == ALIVE + b"data: " + error + b"\n\n" + DONE
    assert client.ended
