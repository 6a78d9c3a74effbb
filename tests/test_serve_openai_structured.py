"""response_format and its kin: every answer parses, and what is impossible is refused before the first byte."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
pytest.importorskip("openai")

import openai
from processes import LIMIT
from pydantic import BaseModel
from serving import Served, generated, serving, text, tokenizer, until

from hf_paged.serve.openai.structured import AT_ONCE

CHAT = [{"role": "user", "content": "Tell me a story"}]
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "owl"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}, "name": {"type": "string", "maxLength": 12}},
    "required": ["animal", "legs", "name"], "additionalProperties": False,
}  # fmt: skip
PATTERN = "(fox|owl), [a-z]{3,8}"
ONES = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
JSON = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}


class Animal(BaseModel):
    animal: str
    legs: int


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(limits={"grammar_chars": 2000}) as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def fits(found: Any) -> bool:
    return (
        found.keys() == {"animal", "legs", "name"}
        and found["animal"] in ("fox", "owl")
        and 0 <= found["legs"] <= 8
        and len(found["name"]) <= 12
    )


def test_chats_in_json(client: openai.OpenAI) -> None:
    """Whole, streamed, several, at any temperature, in openai-python's own parser."""
    for options in ({"temperature": 0}, {"temperature": 1.8, "n": 3, "seed": 5}):
        found = client.chat.completions.create(
            model="demo", messages=CHAT, max_tokens=300, response_format=JSON, **options
        )
        for choice in found.choices:
            assert choice.finish_reason == "stop"
            assert fits(json.loads(choice.message.content))
    stream = client.chat.completions.create(
        model="demo",
        messages=CHAT,
        max_tokens=300,
        response_format=JSON,
        temperature=1.0,
        seed=2,
        stream=True,
    )
    assert fits(json.loads("".join(chunk.choices[0].delta.content or "" for chunk in stream)))
    parsed = client.chat.completions.parse(
        model="demo", messages=CHAT, max_tokens=300, response_format=Animal, temperature=0, logit_bias={}
    )
    assert isinstance(parsed.choices[0].message.parsed, Animal) or parsed.choices[0].finish_reason == "length"
    free = client.chat.completions.create(
        model="demo",
        messages=CHAT,
        max_tokens=300,
        response_format={"type": "json_object"},
        temperature=1.0,
        seed=3,
    )
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "regex", "regex": PATTERN}}, PATTERN),
        ({"structured_outputs": {"regex": PATTERN}}, PATTERN),
        ({"guided_regex": PATTERN}, PATTERN),
        ({"structured_outputs": {"choice": ["yes", "no", 'it "depends"']}}, 'yes|no|it "depends"'),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_choice": ["\U0001f98a!", "\u0000", "\\n/"]}, "\U0001f98a!|\u0000|\\\\n/"),
        ({"structured_outputs": {"grammar": 'start: ("fox" | "owl")+ "!"'}}, "(fox|owl)+!"),
        ({"guided_grammar": 'start: "a" "b"?'}, "ab?"),
        ({"structured_outputs": {"json": {"enum": [1, "x"]}}}, '1|"x"'),
        ({"guided_json": json.dumps({"const": "x y"})}, '"x y"'),
        ({"structured_outputs": {"json": ONES, "disable_any_whitespace": True}}, "\\[1,1\\]"),
        ({"structured_outputs": {"json": ONES, "whitespace_pattern": "~"}}, "\\[~?1~?,~?1~?\\]"),
        ({"guided_json": ONES, "guided_whitespace_pattern": "~"}, "\\[~?1~?,~?1~?\\]"),
    ],
)  # fmt: skip
def test_forms_of_completions(served: Served, fields: dict[str, Any], pattern: str) -> None:
    for options in ({"temperature": 1.5, "n": 4, "seed": 1}, {"use_beam_search": True, "n": 2}):
        found = served.complete("The fox", max_tokens=80, **fields, **options)
        for choice in found["choices"]:
            if choice["finish_reason"] == "stop":
                assert re.fullmatch(pattern, choice["text"]), choice["text"]
            else:
                assert "+" in pattern


@pytest.mark.parametrize(
    ("fields", "blanks"),
    [
        ({"structured_outputs": {"json": ONES}}, False),
        ({"guided_json": ONES}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": ONES}}}, False),
        ({"structured_outputs": {"json": ONES, "disable_any_whitespace": False}}, True),
        ({"guided_json": ONES, "guided_whitespace_pattern": " "}, True),
    ],
)
def test_json_is_compact_unless_blanks_are_allowed(
    served: Served, fields: dict[str, Any], blanks: bool
) -> None:
    """A model that likes nothing better than blanks writes none by default, and few where it may."""
    [blank] = tokenizer()(" ", add_special_tokens=False)["input_ids"]
    found = served.complete("The fox", max_tokens=200, logit_bias={str(blank): 100}, **fields)["choices"][0]
    assert found["finish_reason"] == "stop"
    assert json.loads(found["text"]) == [1, 1]
    assert (" " in found["text"]) == blanks


def test_beside_other_options_and_requests(served: Served) -> None:
    """Penalties, logprobs and stop strings beside a grammar; who asks for none has generate()'s answer."""
    found = served.complete(
        "The fox", max_tokens=60, guided_regex="[a-z ]{20,30}", presence_penalty=0.5, logprobs=2, repetition_penalty=1.1
    )  # fmt: skip
    choice = found["choices"][0]
    assert re.fullmatch("[a-z ]{20,30}", choice["text"])
    assert len(choice["logprobs"]["tokens"]) == found["usage"]["completion_tokens"]
    cut = served.complete("The fox", max_tokens=60, guided_regex="[a-z]{20,30}", stop=["e"])
    assert "e" not in cut["choices"][0]["text"]
    plain = served.complete("The fox", max_tokens=12, response_format={"type": "text"})
    assert plain["choices"][0]["text"] == text(generated("The fox", max_new_tokens=12)[0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "[^\\s\\S]"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1:1/x"}}}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "string"}, "whitespace_pattern": "("}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "guided_regex"),
        ({"guided_regex": "a", "min_tokens": 3}, "guided_regex"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ],
)  # fmt: skip
def test_impossible_forms_are_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        response = served.post("/v1/completions", {"prompt": "The fox", "stream": stream, **fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert param in str(error["param"])
    assert served.complete("The fox", max_tokens=3)["choices"][0]["text"]


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(.*)*x", "([a-z]+)*!", "(a?){64}a{64}"])
def test_patterns_that_would_backtrack_for_ever_are_answered(served: Served, pattern: str) -> None:
    """No pattern of a request runs in an engine that backtracks, neither over prompts nor over answers."""
    begun = time.process_time()
    body = {"prompt": "a" * 200, "max_tokens": 8, "temperature": 0, "guided_regex": pattern}
    assert served.post("/v1/completions", body).status_code == 200
    assert time.process_time() - begun < 10


def test_large_grammars_are_refused(served: Served) -> None:
    response = served.post("/v1/completions", {"prompt": "a", "guided_regex": "a" * 2001})
    assert response.status_code == 413
    schema = {"enum": [f"value {i}" for i in range(500)]}
    assert served.post("/v1/completions", {"prompt": "a", "guided_json": schema}).status_code == 413


def test_a_hostile_grammar_stops_nothing_else() -> None:
    """While it is tried, grammars of other tenants, other requests and /metrics are answered. It is refused."""
    with serving(api_keys=("red", "blue")) as served:
        served.complete(guided_regex="[a-z]{3}", max_tokens=9)
        refused: list[Any] = []

        def ask(number: int) -> None:
            body = {"prompt": "The fox", "guided_json": {"type": "integer", "multipleOf": number}}
            refused.append(served.post("/v1/completions", body))

        threads = [threading.Thread(target=ask, args=(99999901 + 10 * i,)) for i in range(AT_ONCE + 1)]
        for each in threads:
            each.start()
        until(lambda: served.service.admission.in_flight == len(threads))
        assert served.client.get("/v1/models").status_code == 200
        assert served.complete("The fox", max_tokens=5)["choices"][0]["text"]
        found = served.post(
            "/v1/completions",
            {"prompt": "The fox", "guided_regex": "[a-z]{5}", "max_tokens": 9},
            headers={"authorization": "Bearer blue"},
        )
        assert found.json()["choices"][0]["finish_reason"] == "stop"
        assert not refused
        for each in threads:
            each.join(LIMIT)
        assert [each.status_code for each in refused] == [400] * len(threads)
        assert "multipleOf" in refused[0].json()["error"]["message"]
        assert served.complete(guided_regex="[a-z]{4}", max_tokens=9)["choices"][0]["finish_reason"] == "stop"


def test_a_form_that_cannot_be_followed_is_the_clients_error(served: Served) -> None:
    fields = {"guided_grammar": "start: /a{1,5000}/ start", "max_tokens": 20}
    response = served.post("/v1/completions", {"prompt": "The fox", **fields})
    assert response.status_code == 400
    assert "too complex" in response.json()["error"]["message"]
    *_, last = served.stream(prompt="The fox", **fields)
    assert last["error"]["type"] == "invalid_request_error"


def test_thousands_of_choices_are_served() -> None:
    """They were compiled, and refused in the middle of the answer."""
    choices = [f"{'abcdefghij'[i % 10]} story {i}" for i in range(3000)]
    body = {"prompt": "The fox", "max_tokens": 40, "guided_choice": choices}
    with serving() as served:
        answer = served.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] in choices
