"""Bodies: every field is honoured or refused by name, and nothing odd gets further."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cases import every_other

pytest.importorskip("fastapi")

from pydantic import BaseModel, ValidationError
from serving import Served, serving

from hf_paged.serve.app import POSTS
from hf_paged.serve.http.errors import ApiError
from hf_paged.serve.openai.protocol import (
    NEUTRAL,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    fields_of,
    parsed,
)
from hf_paged.serve.openai.responses import ResponsesRequest


@pytest.fixture(scope="module")
def served():
    with serving(
        limits={"stop": 3, "logprobs": 4, "prompts": 2, "logit_bias": 2, "body_bytes": 10_000}
    ) as made:
        yield made


def refused(kind: Any, body: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        parsed(kind, fields_of(json.dumps(body).encode()))
    assert caught.value.status == 400
    return caught.value.body["error"]


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_fields_that_are_not_there_are_refused_by_name(name: str) -> None:
    error = refused(CompletionRequest, {"prompt": "a", name: {"some": "thing"}})
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    for value in (None, *NEUTRAL[name][0]):
        assert name not in fields_of(json.dumps({name: value}).encode())


def test_no_field_is_both_known_and_neutral() -> None:
    for kind in (CompletionRequest, ChatRequest):
        assert not (NEUTRAL.keys() | WITHOUT_EFFECT) & kind.model_fields.keys()


def test_an_unknown_field_names_the_nearest() -> None:
    error = refused(CompletionRequest, {"prompt": "a", "max_token": 3, "temperature": "hot"})
    assert error["message"] == "unknown field 'max_token'; did you mean 'max_tokens'?"
    assert (
        refused(CompletionRequest, {"prompt": "a", "zzz": 1})["message"]
        == "unknown field 'zzz'; leave it out"
    )
    assert refused(CompletionRequest, {"max_tokens": 3})["code"] == "missing_parameter"


@pytest.mark.parametrize(
    ("field", "value", "got"),
    [
        ("max_tokens", -1, "greater than or equal to 0, got -1"),
        ("temperature", "hot", "valid number, got 'hot'"),
        ("seed", "x" * 1000, f"valid integer, got '{'x' * 40}'"),
        ("n", True, "valid integer, got True"),
        ("stop", 3, "valid list, got 3"),
        ("logit_bias", [1], "valid dictionary"),
        ("top_k", 10**30, ""),
    ],
)
def test_an_error_has_what_was_given(field: str, value: Any, got: str) -> None:
    message = refused(CompletionRequest, {"prompt": "a", field: value})["message"]
    assert message.startswith(f"{field}: ")
    assert message.endswith(got)


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("kind", "body", "where", "nearest"),
    [
        (ChatRequest, {"messages": [{"rolee": "user", "content": "a"}]}, "messages.0.rolee", "role"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": 1}]}]},
            "messages.0.content.0.txt",
            "text",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"ulr": "a"}}]}]},
            "messages.0.content.0.image_url.ulr",
            "url",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"argument": "{}"}}]}]},
            "messages.0.tool_calls.0.function.argument",
            "arguments",
        ),
        (
            ChatRequest,
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"scheme": {}}}},
            "response_format.json_schema.scheme",
            "schema",
        ),
        (
            ChatRequest,
            {**CHAT, "stream_options": {"with_usage": True}},
            "stream_options.with_usage",
            "include_usage",
        ),
        (ChatRequest, {**CHAT, "structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "json"),
        (
            ChatRequest,
            {**CHAT, "tool_choice": {"type": "function", "function": {"nam": "a"}}},
            "tool_choice.function.nam",
            "name",
        ),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "content": [{"type": "input_text", "txt": "a"}]}]},
            "input.0.content.0.txt",
            "text",
        ),
        (ResponsesRequest, {"input": "a", "tools": [{"parametres": {}}]}, "tools.0.parametres", "parameters"),
    ],
)
def test_an_unknown_field_within_a_field_names_the_nearest_there(
    kind: Any, body: dict[str, Any], where: str, nearest: str
) -> None:
    error = refused(kind, body)
    assert error["message"] == f"unknown field {where!r}; did you mean {nearest!r}?"
    assert (error["param"], error["code"]) == (where, "unknown_parameter")
    *_, last = where.split(".")
    odd = json.loads(json.dumps(body).replace(f'"{last}"', '"zzzz"'))
    assert refused(kind, odd)["message"].endswith("zzzz'; leave it out")


def test_an_error_within_a_field_has_its_place() -> None:
    part = {"role": "user", "content": [{"type": "text"}]}
    assert refused(ChatRequest, {"messages": [part]})["param"] == "messages.0.content.0.text"
    assert refused(CompletionRequest, {"prompt": "a", "logit_bias": {"5": 1e9}})["param"] == "logit_bias.5"


@pytest.mark.parametrize(
    ("kind", "field", "own"),
    [
        (ResponsesRequest, "max_tokens", "max_output_tokens"),
        (ResponsesRequest, "messages", "input"),
        (ResponsesRequest, "response_format", "text"),
        (ChatRequest, "max_output_tokens", "max_completion_tokens"),
        (CompletionRequest, "input", "prompt"),
    ],
)
def test_a_field_of_another_kind_of_request_names_the_own(kind: Any, field: str, own: str) -> None:
    required = {"input": "a", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    body = {name: value for name, value in required.items() if name in kind.model_fields}
    error = refused(kind, {**body, field: 1})
    assert error["message"] == f"unknown field {field!r}; did you mean {own!r}?"


def test_of_a_value_with_several_forms_the_one_that_fits_is_explained() -> None:
    error = refused(ResponsesRequest, {"input": []})
    assert error["message"].startswith("input: List should have at least 1 item")
    assert error["param"] == "input"


@pytest.mark.parametrize(
    "body",
    [{"stop_token_ids": [10**6]}, {"logit_bias": {"1000000": 1.0}}, {"logprobs": True, "top_logprobs": 9}],
)
def test_the_field_that_is_wrong_is_named(body: dict[str, Any], served: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    error = served.client.post("/v1/chat/completions", json={**chat, **body}).json()["error"]
    assert error["param"] == list(body)[-1]
    assert list(body)[-1] in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", "1"), ("temperature", True), ("top_p", 1.1), ("top_p", -1),
        ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("repetition_penalty", 0), ("repetition_penalty", 1e300),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("n", 0), ("n", 10**9 + 2**31), ("n", "2"), ("max_tokens", -1),
        ("max_tokens", 2**40), ("max_tokens", 1.0), ("min_tokens", -1), ("seed", 2**63), ("logprobs", -1), ("stop", 5),
        ("stop", [5]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("logit_bias", {"1": 101}),
        ("logit_bias", [1]), ("stream", "yes"), ("stream_options", {"include_usage": True, "other": 1}),
        ("priority", 2**31), ("cache_salt", ""), ("cache_salt", 5), ("length_penalty", 11), ("model", 5), ("prompt", 5),
        ("prompt", []), ("prompt", [[]]), ("prompt", ["a", 1]), ("prompt", [1, True]), ("prompt", [1.0]), ("prompt", {}),
        ("prompt", [["a"]]), ("prompt", None), ("echo", 1), ("best_of", 0),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(field: str, value: Any) -> None:
    error = refused(CompletionRequest, {"prompt": "a", field: value})
    assert field in (error["param"] or error["message"])


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b'"a"', b"null", b"NaN", b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": -Infinity}', b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"prompt": "\xff"}', b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", b'{"a": 1' + b"0" * 5000 + b"}", b"\x00", b"{'prompt': 'a'}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_requests(body: bytes) -> None:
    with pytest.raises(ApiError, match=r"; send an object|^temperature: ") as caught:
        parsed(CompletionRequest, fields_of(body))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        {"stop": ["a"] * 4}, {"stop": "a" * 257}, {"stop": [""]}, {"logprobs": 5}, {"prompt": ["a"] * 3},
        {"logit_bias": {"1": 1, "2": 1, "3": 1}}, {"logit_bias": {"one": 1}}, {"logit_bias": {"-1": 1}},
        {"logit_bias": {"900000": 1}}, {"stop_token_ids": [900000]}, {"n": 2, "temperature": 0}, {"priority": 1},
        {"length_penalty": 2.0}, {"early_stopping": True}, {"stream_options": {"include_usage": True}},
        {"use_beam_search": True, "temperature": 0.5}, {"use_beam_search": True, "top_p": 0.5},
        {"use_beam_search": True, "n": 2, "top_k": 5}, {"max_tokens": 0}, {"prompt_logprobs": 5},
        {"min_tokens": 5, "max_tokens": 4}, {"max_tokens": 2000}, {"n": 200, "temperature": 1},
        {"use_beam_search": True, "n": 33}, {"use_beam_search": True, "seed": 3},
    ],
)  # fmt: skip
def test_limits_and_contradictions_are_refused(served: Served, body: dict[str, Any]) -> None:
    assert served.refusal(**body)["message"]


def test_sizes_and_types_of_bodies(served: Served) -> None:
    url = "/v1/completions"
    big = json.dumps({"prompt": "a" * 10_000})
    assert (
        served.client.post(url, content=big, headers={"content-type": "application/json"}).status_code == 413
    )
    chunks = (part.encode() for part in [big[:5000], big[5000:]])  # without a length
    assert (
        served.client.post(url, content=chunks, headers={"content-type": "application/json"}).status_code
        == 413
    )
    assert served.client.post(url, content=b"{}").status_code == 415
    assert served.client.post(url, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    wrong = served.client.get(url)
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"] == "this path does not take GET, it takes POST"
    assert served.client.get("/nope").json()["error"]["type"] == "not_found_error"


def test_the_description_names_every_field(served: Served) -> None:
    described = served.client.get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"].keys() == CompletionRequest.model_fields.keys()
    assert schemas["ChatRequest"]["properties"].keys() == ChatRequest.model_fields.keys()
    body = described["paths"]["/v1/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/CompletionRequest"}
    assert "Message" in schemas


LONG = 3000
KINDS = [kind for post in POSTS for kind in post.kinds]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_long_list_of_wrong_items_is_one_error(kind: type[BaseModel]) -> None:
    """Of any field, also deep within others: an error for each item would take seconds and gigabytes."""
    for name, field in kind.model_fields.items():
        for wrong in ([-500.5] * LONG, {str(i): -500.5 for i in range(LONG)}):
            for value in (wrong, [{"role": "user", "type": "text", "content": wrong, "tool_calls": wrong}]):
                assert _errors(kind, {field.alias or name: value}) < 40, name


def _errors(kind: type[BaseModel], body: dict[str, Any]) -> int:
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"prompt": "a", **{f"x{i}": 1 for i in range(300)}}, 400, "301 fields"),
        ({"prompt": "a", "y" * 100_000: 1}, 400, "y" * 80 + "'"),
        ({"prompt": [[5]] * 10_001}, 400, "prompt: 10001 prompts are given"),
        ({"prompt": 5}, 400, "a list of such lists, got another int"),
        ({"prompt": []}, 400, "a list of such lists, got an empty list"),
        ({"prompt": ["a", 5]}, 400, "a list of such lists, got another list"),
    ],
    ids=range(6),
)
def test_large_and_odd_objects(body: dict[str, Any], status: int, named: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(CompletionRequest, fields_of(json.dumps(body).encode()))
    assert caught.value.status == status
    assert named in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(("body", "stream"), every_other([
        {"temperature": 1e-300}, {"temperature": 1e-5}, {"temperature": 100}, {"top_p": 0.0, "temperature": 1},
        {"top_p": 1e-300, "temperature": 1}, {"top_k": 2**31 - 1, "temperature": 1}, {"min_p": 1.0, "temperature": 1},
        {"repetition_penalty": 0.01}, {"repetition_penalty": 100}, {"seed": -(2**63), "temperature": 1},
        {"seed": 2**63 - 1, "temperature": 1}, {"logit_bias": {"5": -100, "6": 100}}, {"presence_penalty": -2},
        {"use_beam_search": True, "n": 4, "length_penalty": -10}, {"use_beam_search": True, "n": 4, "length_penalty": 10},
        {"use_beam_search": True, "n": 4, "early_stopping": True}, {"use_beam_search": True},
        {"stop": ["\u20ac", "a", "\n"]}, {"ignore_eos": True, "min_tokens": 4}, {"min_tokens": 6},
        {"logprobs": 4, "n": 3, "temperature": 1}, {"logprobs": 0, "stop": "e"}, {"use_beam_search": True, "n": 2, "logprobs": 1},
    ], [False, True]))  # fmt: skip
def test_every_allowed_extreme_is_answered(served: Served, body: dict[str, Any], stream: bool) -> None:
    """Bodies that the checks let through must not fail in the engine."""
    response = served.post(
        "/v1/completions", {"prompt": "The fox", "max_tokens": 6, "stream": stream, "temperature": 0, **body}
    )
    if "\u20ac" in str(body):
        assert response.status_code in (200, 400)
    else:
        assert response.status_code == 200, response.text
    assert '"error"' not in response.text or response.status_code == 400


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("responses", '"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"minimum": [1e400]}}]', "tools.0"),
        ("responses", '"input": "a", "text": {"format": {"type": "json_schema", "name": "f", "schema": {"minimum": -1e400}}}', "text.format"),
        ("chat/completions", '"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": 1e999}', "chat_template_kwargs"),
        ("completions", '"prompt": "a", "guided_json": {"minimum": 1e400}', "guided_json"),
    ],
)  # fmt: skip
def test_numbers_that_json_cannot_carry_again_are_refused(
    served: Served, path: str, fields: str, param: str
) -> None:
    """1e400 is read as infinity, also in objects whose fields are not checked."""
    for stream in ("true", "false"):
        response = served.client.post(
            f"/v1/{path}", content=f'{{{fields}, "stream": {stream}}}', headers={"content-type": "application/json"}
        )  # fmt: skip
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"].startswith(param)
        assert "beyond 1e308" in error["message"]


@pytest.mark.parametrize("key", ["1_0", "+5", " 5", "05", "-0", "\u0665", "5.0", "five", "", "9" * 5000])
def test_keys_of_logit_bias_are_plain_numbers(served: Served, key: str) -> None:
    error = served.refusal(logit_bias={"5": 1.0, key: 1.0})
    assert error["param"] == "logit_bias"
    assert repr(key)[:50] in error["message"]
    assert "expected the number of a token" in error["message"]
