"""hf_paged.ray without ray: the routing decision, held answers, flags, the autoscaling policy."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from starlette.types import Message

import hf_paged.ray
from hf_paged.blocks.prefix_lookup import Prompt
from hf_paged.ray.autoscaling import FuturePeakPolicy
from hf_paged.ray.flags import namespace
from hf_paged.ray.relay import HeldAnswer, ReplicaFailed
from hf_paged.ray.routing import LoadBound, PrefixIndex, ranked
from hf_paged.serve.http.errors import unavailable
from hf_paged.serve.http.streams import ALIVE, DONE, event
from hf_paged.serve.openai.responses_format import failed

NAMES = ["a", "b", "c", "d"]
IDLE = dict.fromkeys(NAMES, 0)


def ranks(
    index: PrefixIndex, digests: tuple[bytes, ...], loads: dict[str, int], **bound: Any
) -> list[list[str]]:
    return ranked(digests, loads, index, LoadBound(**bound), random.Random(0))


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_the_error_names_the_extra() -> None:
    with pytest.raises(ImportError, match=r"pip install 'hf_paged\[ray\]'"):
        hf_paged.ray.map_batches  # noqa: B018


def chained(tokens: Iterable[int], extra: bytes = b"") -> tuple[bytes, ...]:
    return tuple(Prompt(list(tokens), 16, extra).digests)


@pytest.mark.parametrize("blocks", range(5))
def test_the_longest_prefix_is_found(blocks: int) -> None:
    index = PrefixIndex()
    prompt = chained(range(64))
    index.add("a", prompt[:blocks])
    assert index.match("a", prompt) == blocks
    assert index.match("b", prompt) == 0


def test_the_replica_with_the_longest_prefix_comes_first() -> None:
    index = PrefixIndex()
    prompt = chained(range(160))
    index.add("a", prompt[:4])
    index.add("b", prompt[:8])
    index.add("c", prompt[:8])
    found = ranks(index, prompt, IDLE)
    assert sorted(found[0]) == ["b", "c"]
    assert len(found[1]) == 2
    assert found[2] == NAMES


def test_a_short_prefix_is_no_reason() -> None:
    index = PrefixIndex()
    prompt = chained(range(160))
    index.add("a", prompt[:2])
    assert len(ranks(index, prompt, IDLE)) == 2, "2 of 10 blocks: two at random, then all"
    assert ranks(index, prompt, IDLE, least_share=0.2)[0] == ["a"]


def test_a_replica_that_is_too_busy_is_passed_over() -> None:
    """Mean 9 with the next request: more than 12 are 1.25 times that."""
    index = PrefixIndex()
    prompt = chained(range(160))
    index.add("a", prompt)
    index.add("b", prompt[:5])
    loads = {"a": 11, "b": 8, "c": 8, "d": 8}
    assert ranks(index, prompt, loads)[0] == ["a"]
    loads = {"a": 12, "b": 8, "c": 8, "d": 7}
    assert ranks(index, prompt, loads)[0] == ["b"], "the next longest"
    assert ranks(index, prompt, loads, ratio=1.5)[0] == ["a"]


def test_few_requests_are_never_too_many() -> None:
    index = PrefixIndex()
    prompt = chained(range(16))
    index.add("a", prompt)
    assert ranks(index, prompt, {**IDLE, "a": 3})[0] == ["a"]
    assert ranks(index, prompt, {**IDLE, "a": 4})[0] != ["a"]


def test_one_replica_is_enough() -> None:
    assert ranks(PrefixIndex(), (), {"a": 100}) == [["a"], ["a"]]


def test_two_choices_are_spread() -> None:
    draw = random.Random(1)
    first = [ranked((), IDLE, PrefixIndex(), LoadBound(), draw)[0] for _ in range(400)]
    for name in NAMES:
        assert 150 < sum(name in pair for pair in first) < 250


def test_an_index_forgets_as_its_replica_evicts() -> None:
    """The least recently used prompt, its last blocks first."""
    index = PrefixIndex()
    index.keep({"a": 12, "b": None})
    old = chained(range(160), b"old")
    new = chained(range(128), b"new")
    index.add("a", old)
    index.add("a", new)
    assert index.match("a", new) == 8
    assert index.match("a", old) == 4
    index.add("a", old[:4])
    index.add("a", chained(range(96), b"third"))
    assert index.match("a", old) == 4
    assert index.match("a", new) == 2


def test_an_index_forgets_replicas_that_have_left() -> None:
    index = PrefixIndex()
    prompt = chained(range(64))
    index.keep({"a": 100, "b": 100})
    index.add("a", prompt)
    index.add("b", prompt)
    index.keep({"b": 100})
    assert index.match("a", prompt) == 0
    index.keep({"a": 100, "b": 100})
    assert index.match("a", prompt) == 0
    assert index.match("b", prompt) == 4
    index.forget("b")
    assert index.match("b", prompt) == 0


@pytest.mark.parametrize("wrong", [{"ratio": 0.9}, {"free": -1}, {"least_share": 2}])
def test_wrong_bounds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*; give"):
        LoadBound(**wrong)


# ---- answers that are held


class Client:
    """What a client gets."""

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


# ---- answers of /v1/responses


def of_responses(*kinds: str, first: int = 0, **more: Any) -> bytes:
    """Events with their names and numbers."""
    found = []
    for number, kind in enumerate(kinds, first):
        said = {"type": kind, "response": {"id": "resp_1", "status": "in_progress"}, **more}
        found.append(f"event: {kind}\n".encode() + event({**said, "sequence_number": number}))
    return b"".join(found)


OPENING = of_responses("response.created", "response.in_progress")


def last_event(client: Client) -> dict[str, Any]:
    """What the last event says that a client has."""
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


# ---- flags


def test_flags_are_those_of_the_server() -> None:
    found = namespace(
        {
            "model": "demo", "max-num-seqs": 32, "block_size": "8", "served-model-name": ["x", "y"],
            "allowed_origin": ["https://a", "https://b"], "enforce-eager": True, "compile": False, "seed": None,
        }
    )  # fmt: skip
    assert (found.model, found.max_num_seqs, found.block_size) == ("demo", 32, 8)
    assert found.served_model_name == ["x", "y"]
    assert found.allowed_origin == ["https://a", "https://b"]
    assert found.enforce_eager
    assert not found.compile
    assert found.seed is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "args.model must be"),
        ({"model": "demo", "block-sise": 8}, "block-sise.*did you mean --block-size"),
        (
            {"model": "demo", "block-size": "many"},
            "block-size: expected a whole number from 1 on, got 'many'",
        ),
        ({"model": "demo", "port": 1}, "http_options.port"),
        ({"model": "demo", "dev": True}, "user_config"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        namespace(options)


# ---- autoscaling


@pytest.mark.parametrize(
    ("metrics", "replicas"),
    [
        ({}, 3),
        ({"future_peak": {"a": 0.8, "b": 0.8}, "rows": {"a": 0.1, "b": 0.1}}, 2),
        ({"future_peak": {"a": 2.0, "b": 0.4}, "rows": {"a": 0.1, "b": 0.1}}, 3),
        ({"future_peak": {"a": 0.1}, "rows": {"a": 3.2}}, 4),
        ({"future_peak": {"a": 0.0}, "rows": {"a": 0.0}}, 0),
    ],
)
def test_replicas_are_as_many_as_hold_the_future_peak(metrics: dict[str, Any], replicas: float) -> None:
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=3)
    wanted, state = FuturePeakPolicy(target=0.8)(context)
    assert wanted == pytest.approx(replicas)
    assert state == {}


def test_a_wrong_target_is_refused() -> None:
    with pytest.raises(ValueError, match="target=0 is not a share"):
        FuturePeakPolicy(0)


def test_the_example_is_understood() -> None:
    """Every key of deploy/ray.yaml is one, and its names can be imported."""
    config = yaml.safe_load((Path(__file__).parents[1] / "deploy" / "ray.yaml").read_text())
    (application,) = config["applications"]
    args = application["args"]
    LoadBound(**args.pop("routing"))
    assert namespace(args).model == "demo"
    replica, gateway = application["deployments"]
    policy = replica["autoscaling_config"]["policy"]
    assert policy["policy_function"] == f"{FuturePeakPolicy.__module__}:{FuturePeakPolicy.__name__}"
    FuturePeakPolicy(**policy["policy_kwargs"])
    assert (replica["name"], gateway["name"]) == ("Replica", "Gateway")
