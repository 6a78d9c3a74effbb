"""Tools and reasoning: written by the chat template, read by transformers' response templates."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
pytest.importorskip("openai")
pytest.importorskip(
    "transformers.utils.chat_parsing.response_templates", reason="this transformers reads no answers"
)

import openai
from cases import examples
from reply_cases import CALL, CHAT, CLOCK, TEMPLATE, WEATHER, reading, saying, unread
from serving import Served, serving, tokenizer

from hf_paged.serve.openai.protocol import ChatRequest
from hf_paged.serve.openai.reply_parser import Replies

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tokenizer=reading(), limits={"tools": 3}) as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_what_a_model_says_is_read(client: openai.OpenAI) -> None:
    """Whole and in chunks alike: reasoning, content, and two calls."""
    said = f"<think>\nLet me see.\n</think>\n\nI will ask. \n{CALL}{CALL.replace('Paris', 'Rome')}"
    request = {
        "model": "demo", "messages": CHAT, "max_tokens": 400, "temperature": 0, "tools": [WEATHER, CLOCK], "extra_body": saying(said),
    }  # fmt: skip
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "I will ask."
    assert choice.message.reasoning_content == "Let me see."
    calls = [(each.function.name, json.loads(each.function.arguments)) for each in choice.message.tool_calls]
    assert calls == [
        ("weather", {"place": "Paris", "days": 2}),
        ("weather", {"place": "Rome", "days": 2}),
    ]
    assert len({each.id for each in choice.message.tool_calls}) == 2
    chunks = list(client.chat.completions.create(**request, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(each.content or "" for each in deltas) == choice.message.content
    assert "".join(getattr(each, "reasoning_content", None) or "" for each in deltas) == "Let me see."
    streamed = [call for each in deltas for call in each.tool_calls or ()]
    assert [each.index for each in streamed] == [0, 1]
    assert [(each.function.name, json.loads(each.function.arguments)) for each in streamed] == calls
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    one = client.chat.completions.create(**request, parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1


def test_a_chat_template_of_another_form_shows_no_prompt(client: openai.OpenAI) -> None:
    """Where the response template does not find the beginning of the answer, the answer is read by itself."""
    made = reading()
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with (
        serving(tokenizer=made) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as other,
    ):
        for said in ("A plain answer.", f"<think>Hm.</think>Well. {CALL}"):
            request = {
                "model": "demo",
                "messages": CHAT,
                "max_tokens": 200,
                "temperature": 0,
                "extra_body": saying(said),
            }
            choice = other.chat.completions.create(**request).choices[0]
            assert (
                choice.message.content == client.chat.completions.create(**request).choices[0].message.content
            )
            assert "weather in Paris" not in choice.message.content


def test_a_message_is_continued(client: openai.OpenAI, served: Served) -> None:
    """The answer is what follows; the beginning that the client sent is no part of it."""
    begun = [*CHAT, {"role": "assistant", "content": "Once upon"}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    request = {"model": "demo", "messages": begun, "max_tokens": 100, "temperature": 0}
    whole = client.chat.completions.create(**request, extra_body={**going_on, **saying(" a time.")}).choices[
        0
    ]
    assert whole.message.content == " a time."
    chunks = client.chat.completions.create(
        **request, extra_body={**going_on, **saying(" a time.")}, stream=True
    )
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == " a time."


def test_a_call_alone_has_no_content(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=200, tools=[WEATHER], extra_body=saying(CALL)
    ).choices[0]
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize(
    "said", ["<tool_call>{not json}</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>{}"]
)
def test_a_call_that_cannot_be_read_is_content(client: openai.OpenAI, said: str) -> None:
    """Nothing is lost silently, and nothing fails."""
    request = {
        "model": "demo", "messages": CHAT, "max_tokens": 200, "tools": [WEATHER], "extra_body": saying(f"Well. {said}"),
    }  # fmt: skip
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.finish_reason == "stop"
    inner = said.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert choice.message.content.startswith("Well.")
    assert inner in choice.message.content
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


BY_TAGS = {
    **TEMPLATE,
    "fields": {
        **TEMPLATE["fields"],
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>", "close_pattern": r"</function>\s*</tool_call>", "repeats": True,
            "content": "xml-inline", "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}  # fmt: skip
"""The form of Qwen 3.5's calls, by patterns that transformers has for them."""


@pytest.mark.parametrize("size", [50, 10**6], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("template", "hostile"),
    [
        (TEMPLATE, " " * 40_000 + "x"),  # the square
        (BY_TAGS, f"<tool_call><function=f><parameter=a>{' ' * 6000}</function></tool_call>"),  # the cube
        (TEMPLATE, f"<tool_call>{'[' * 40_000}</tool_call>"),  # deeper than Python recurses
    ],
    ids=["blanks", "parameters", "brackets"],
)
def test_an_answer_that_takes_too_long_to_read_is_content(
    template: dict[str, Any], hostile: str, size: int
) -> None:
    """A client can have the model write it; the server's event loop would wait for minutes."""
    request = ChatRequest.model_validate({"messages": CHAT})
    [reply] = Replies(template).of(request, lambda: "<|assistant|>")
    said = f"Well. {hostile} The end."
    begun = time.process_time()
    shown = "".join(
        reply.add(said[i : i + size], i + size >= len(said)).content for i in range(0, len(said), size)
    )
    assert time.process_time() - begun < 5
    assert shown.startswith("Well.")
    assert shown.endswith("The end.")
    assert len(said) - len(shown) < 60  # the marks of a call


def test_calls_by_tags_are_read() -> None:
    request = ChatRequest.model_validate({"messages": CHAT})
    [reply] = Replies(BY_TAGS).of(request, lambda: "<|assistant|>")
    call = (
        "<tool_call>\n<function=weather>\n<parameter=place>\nParis\n</parameter>\n</function>\n</tool_call>"
    )
    found = reply.add(f"Well.\n\n{call}", True)
    assert found.content == "Well."
    assert [(each.name, json.loads(each.arguments)) for each in found.calls] == [
        ("weather", {"place": "Paris"})
    ]


def test_text_without_marks_is_content(served: Served) -> None:
    """The same as without a response template."""
    body = {"messages": CHAT, "max_tokens": 20, "temperature": 0}
    found = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    raw = served.post("/v1/chat/completions", {**body, "skip_special_tokens": False}).json()["choices"][0]
    assert found == {"role": "assistant", "content": found["content"], "refusal": None}
    assert raw["message"]["content"].removesuffix("<|eos|>") == found["content"]
    chunks = served.stream("/v1/chat/completions", **body)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == found["content"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_required_and_named_calls(client: openai.OpenAI) -> None:
    """By a grammar: the arguments always fit, whatever the model would say."""
    for seed in range(2):
        request = {
            "model": "demo", "messages": CHAT, "max_tokens": 600, "temperature": 1.3, "seed": seed, "tools": [WEATHER, CLOCK],
        }  # fmt: skip
        choice = client.chat.completions.create(
            **request, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert arguments["place"] in ("Paris", "Rome")
        else:
            assert arguments in ({"zone": "UTC"}, {"zone": "CET"})
        named = client.chat.completions.create(
            **request, tool_choice={"type": "function", "function": {"name": "clock"}}, stream=True
        )
        chunks = list(named)
        [call] = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert call.function.name == "clock"
        assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_first_call_of_the_guide() -> None:
    """The demo model as it is: a call, the turn after it, a call in the template's own form, and a story."""
    guide = (ROOT / "docs" / "serving.md").read_text()
    body = json.loads(re.search(r"curl \S+/v1/chat/completions .*?-d '(.*?)'", guide, re.S)[1])
    call = json.loads(re.search(r"has the call `(.*?)`", guide, re.S)[1])
    free = {key: body[key] for key in ("messages", "tools")} | {"max_tokens": 60, "temperature": 0}
    with serving() as made:

        def choice(**fields: Any) -> Any:
            response = made.post("/v1/chat/completions", fields)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]

        first = choice(**body)
        assert first["finish_reason"] == "tool_calls"
        assert [each["function"] for each in first["message"]["tool_calls"]] == [call]
        made_up = f'<tool_call>{{"name": "get_weather", "arguments": {call["arguments"]}}}</tool_call>'
        assert choice(**free, **saying(made_up))["message"]["tool_calls"][0]["function"] == call
        assert "tool_calls" not in choice(**free)["message"]
        result = {"role": "tool", "tool_call_id": first["message"]["tool_calls"][0]["id"], "content": "sunny"}
        free["messages"] = [*free["messages"], first["message"], result]
        assert choice(**free)["message"]["content"]
        asked = made.post("/tokenize", {"messages": free["messages"], "tools": free["tools"]}).json()[
            "tokens"
        ]
    assert tokenizer().decode(asked) == (
        "<|bos|><|system|>Tools: get_weather(city).<|eos|><|user|>What is the weather in Paris?<|eos|><|assistant|>"
        f"{made_up}<|eos|><|user|>sunny<|eos|><|assistant|>"
    )


def test_required_calls_need_no_response_template() -> None:
    with serving(tokenizer=unread()) as served:
        body = {
            "messages": CHAT,
            "max_tokens": 300,
            "tools": [WEATHER],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        choice = served.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        refused = served.refusal("/v1/chat/completions", messages=CHAT, tools=[WEATHER])
        assert "--response-template" in refused["message"]


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"$ref": "#/definitions/X", "definitions": {"X": {"const": 5}}}, lambda found: found == 5),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/a-b"}}, "required": ["a"], "additionalProperties": False, "$defs": {"a-b": {"enum": ["x"]}}}, lambda found: found == {"a": "x"}),
        ({"type": "array", "maxItems": 1, "items": {"$ref": "#"}}, lambda found: str(found).strip("[]") == ""),
        ({"const": {"$ref": "#/x"}}, lambda found: found == {"$ref": "#/x"}),
    ],
)  # fmt: skip
def test_references_of_tools_mean_their_own_schemas(served: Served, schema: Any, fits: Any) -> None:
    """Where the answer is a list of calls as where it is the arguments of one."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    other = {"type": "function", "function": {"name": "g", "parameters": {"const": 7}}}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        for seed in range(examples(1)):
            body = {
                "messages": CHAT, "max_tokens": 400, "temperature": 1, "seed": seed, "tools": [other, tool], "tool_choice": choice, "parallel_tool_calls": False,
            }  # fmt: skip
            found = served.post("/v1/chat/completions", body)
            assert found.status_code == 200, found.text
            for call in found.json()["choices"][0]["message"].get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                assert fits(arguments) if call["function"]["name"] == "f" else arguments == 7


def test_tools_and_their_results_reach_the_template(served: Served) -> None:
    """A whole turn as openai-python sends it: the answer's message back, then the tool's result."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"place": "Rome"}'},
    }
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]  # fmt: skip
    body = {"messages": messages, "tools": [WEATHER, CLOCK], "reasoning_effort": "low"}
    ids = served.post("/tokenize", body).json()["tokens"]
    assert tokenizer().decode(ids) == (
        "<|user|>What is the weather in Paris?<|assistant|><tool_call>weather Rome</tool_call><|user|>sunny"
        "<|system|>weather,clock<|system|>low<|assistant|>"
    )
    none = served.post("/tokenize", {**body, "tool_choice": "none"}).json()["tokens"]
    assert "clock" not in tokenizer().decode(none)
    said = {**body, "max_tokens": 5, "temperature": 0}
    assert served.post("/v1/chat/completions", said).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "other", "function": {"name": "a"}}]},
        {"tools": [WEATHER, WEATHER]},
        {"tools": [{**WEATHER, "function": {"name": f"f{i}"}} for i in range(4)]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [WEATHER]},
        {"tool_choice": "sometimes", "tools": [WEATHER]},
        {"tool_choice": "required", "tools": [WEATHER], "response_format": {"type": "json_object"}},
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
        },
        {"reasoning_effort": "huge"},
        {"messages": [{"role": "tool", "content": None}]},
        {"messages": [{"role": "user", "content": "a", "tool_calls": []}, {"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]},
        {"messages": [{"role": "assistant", "content": None}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{no"}}]},
                *CHAT,
            ]
        },
        {"functions": [{"name": "f"}]},
    ],
)
def test_refused_tools(served: Served, body: dict[str, Any]) -> None:
    assert served.refusal("/v1/chat/completions", **{"messages": CHAT, **body})["message"]


def test_a_templates_errors_come_at_the_start() -> None:
    with pytest.raises(ValueError, match="start_anchor"):
        Replies({"fields": {"content": {"content": "text"}}})
    request = ChatRequest.model_validate({"messages": CHAT})
    assert Replies(None).of(request, lambda: "") == []


def test_an_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no module that reads answers."""
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing.response_templates", None)
    with pytest.raises(
        ValueError, match=r"transformers .* cannot read answers by a response template; upgrade it"
    ):
        Replies(TEMPLATE)
