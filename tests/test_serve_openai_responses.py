"""/v1/responses by openai-python: the answers of chats, as items and events, without a store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
pytest.importorskip("openai")

import openai
import pydantic
from openai.types.responses import Response
from reply_cases import CALL, WEATHER, holds, reading, saying
from serving import Served, serving

from hf_paged.serve.http import openapi

TOOL = {"type": "function", **WEATHER["function"]}
STORY = "Tell me a story"
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def reader() -> Iterator[openai.OpenAI]:
    """A client of a model with tools and reasoning."""
    with (
        serving(tokenizer=reading()) as made,
        openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def chatted(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    """The same by a chat."""
    return client.chat.completions.create(
        model="demo", messages=messages, temperature=0, max_tokens=12, **options
    )


def test_a_text(served: Served, client: openai.OpenAI) -> None:
    found = client.responses.create(**GREEDY, input=STORY)
    chat = chatted(client, [{"role": "user", "content": STORY}])
    assert found.output_text == chat.choices[0].message.content
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.store, found.previous_response_id, found.error) == (False, None, None)
    assert (found.usage.input_tokens, found.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert found.usage.input_tokens_details.cached_tokens >= 0
    for most, status in ((12, "incomplete"), (200, "completed")):
        body = served.post(
            "/v1/responses", {"input": STORY, "temperature": 0, "max_output_tokens": most}
        ).json()
        assert body["status"] == body["output"][0]["status"] == status
        holds(openapi.ResponseObject, body)
        Response.model_validate(body)


def test_conversations(client: openai.OpenAI) -> None:
    """Instructions, messages of all roles, and an answer that is sent back as it came."""
    first = client.responses.create(**GREEDY, input=STORY, instructions="Be brief")
    items: list[Any] = [
        {"role": "user", "content": STORY}, *first.output,
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be"}, {"type": "input_text", "text": " kind"}]},
        {"role": "user", "content": "More"},
    ]  # fmt: skip
    second = client.responses.create(**GREEDY, input=items, instructions="Be brief")
    messages = [
        {"role": "system", "content": "Be brief"}, {"role": "user", "content": STORY}, {"role": "assistant", "content": first.output_text},
        {"role": "developer", "content": "Be kind"}, {"role": "user", "content": "More"},
    ]  # fmt: skip
    chat = chatted(client, messages)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.instructions == "Be brief"


def test_events_come_in_their_order(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "max_output_tokens": 48}  # tokens that wait for each other come together
    whole = client.responses.create(**asked, input=STORY)
    events = list(client.responses.create(**asked, input=STORY, stream=True))
    kinds = [each.type for each in events]
    deltas = [each for each in events if each.type == "response.output_text.delta"]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert len(deltas) > 3
    assert "".join(each.delta for each in deltas) == whole.output_text == events[-4].text
    assert {each.item_id for each in deltas} == {events[-1].response.output[0].id}
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 48
    assert events[0].response.status == "in_progress"
    assert events[0].response.usage is None


def test_the_stream_helper_and_async_clients(served: Served, client: openai.OpenAI) -> None:
    whole = client.responses.create(**{**GREEDY, "max_output_tokens": 200}, input=STORY)
    with client.responses.stream(**{**GREEDY, "max_output_tokens": 200}, input=STORY) as stream:
        assert stream.get_final_response().output_text == whole.output_text

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as made:
            stream = await made.responses.create(**GREEDY, input=STORY, stream=True)
            return "".join([each.delta async for each in stream if each.type == "response.output_text.delta"])

    assert whole.output_text.startswith(asyncio.run(ask()))


def test_reasoning_text_and_calls_are_items(reader: openai.OpenAI) -> None:
    """Whole and in events alike; sent back, they are the same conversation as a chat's."""
    said = f"<think>\nLet me see.\n</think>\n\nI will ask. {CALL}{CALL.replace('Paris', 'Rome')}"
    request = {
        "model": "demo", "input": STORY, "max_output_tokens": 400, "temperature": 0, "tools": [TOOL], "extra_body": saying(said),
    }  # fmt: skip
    whole = reader.responses.create(**request)
    assert [each.type for each in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "Let me see."
    assert whole.usage.output_tokens_details.reasoning_tokens > 2
    assert whole.output_text.strip() == "I will ask."
    calls = [json.loads(each.arguments) for each in whole.output[2:]]
    assert [(each["place"], each["days"]) for each in calls] == [("Paris", 2), ("Rome", 2)]
    assert whole.tools[0].name == "weather"
    events = list(reader.responses.create(**request, stream=True))
    final = events[-1].response
    texts = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
    assert "".join(texts) == "Let me see."
    added = [each.item.type for each in events if each.type == "response.output_item.added"]
    done = [each.item for each in events if each.type == "response.output_item.done"]
    assert added == [each.type for each in whole.output]
    assert [each.id for each in done] == [each.id for each in final.output]
    assert [each.arguments for each in events if each.type == "response.function_call_arguments.done"] == [
        each.arguments for each in whole.output[2:]
    ]
    results = [
        {"type": "function_call_output", "call_id": each.call_id, "output": "sun"}
        for each in whole.output[2:]
    ]
    back = [{"role": "user", "content": STORY}, *whole.output, *results]
    again = reader.responses.create(**GREEDY, input=back, tools=[TOOL])
    calls_back = [
        {"id": each.call_id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for each in whole.output[2:]
    ]
    messages = [
        {"role": "user", "content": STORY},
        {"role": "assistant", "content": whole.output_text, "reasoning_content": "Let me see.", "tool_calls": calls_back},
        *[{"role": "tool", "tool_call_id": each["call_id"], "content": "sun"} for each in results],
    ]  # fmt: skip
    chat = chatted(reader, messages, tools=[WEATHER])
    assert again.usage.input_tokens == chat.usage.prompt_tokens
    assert again.output_text == chat.choices[0].message.content


def test_a_named_function(reader: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "weather"}
    found = reader.responses.create(
        model="demo", input=STORY, max_output_tokens=200, tools=[TOOL], tool_choice=choice
    )
    [call] = found.output
    assert (call.type, call.name, found.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["place"] in ("Paris", "Rome")
    cut = reader.responses.create(
        model="demo", input=STORY, max_output_tokens=2, tools=[TOOL], tool_choice=choice
    )
    assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")


class Owl(pydantic.BaseModel):
    name: Literal["Una", "Otis"]


def test_forms_of_text(client: openai.OpenAI) -> None:
    found = client.responses.parse(
        model="demo", input=STORY, text_format=Owl, max_output_tokens=250, temperature=0
    )
    assert isinstance(found.output_parsed, Owl)
    free = client.responses.create(
        model="demo",
        input=STORY,
        text={"format": {"type": "json_object"}},
        max_output_tokens=5,
        temperature=0,
    )
    assert free.output_text.startswith("{")


def test_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    found = client.responses.create(**GREEDY, input=STORY, **options)
    notes = found.output[0].content[0].logprobs
    chat = chatted(client, [{"role": "user", "content": STORY}], logprobs=True, top_logprobs=1)
    assert [each.logprob for each in notes] == pytest.approx(
        [each.logprob for each in chat.choices[0].logprobs.content]
    )
    events = client.responses.create(**GREEDY, input=STORY, **options, stream=True)
    streamed = [
        note for each in events if each.type == "response.output_text.delta" for note in each.logprobs
    ]
    assert [each.token for each in streamed] == [each.token for each in notes]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "no"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, None),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "input"),
        ({"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"input": None}, "input"),
    ],
)  # fmt: skip
def test_refusals(served: Served, fields: dict[str, Any], param: str | None) -> None:
    """By name, before the first byte, in the words of this API."""
    for stream in (False, True):
        response = served.post("/v1/responses", {"input": STORY, **fields, "stream": stream})
        assert response.status_code == 400, response.text
        if param is not None:
            assert response.json()["error"]["param"].startswith(param), response.text


def test_what_asks_for_nothing_is_taken(served: Served) -> None:
    body = {
        "input": STORY, "store": False, "previous_response_id": None, "truncation": "disabled", "metadata": {"a": "b"}, "user": "me",
        "parallel_tool_calls": True, "reasoning": {"effort": None}, "include": ["reasoning.encrypted_content"], "text": {"format": {"type": "text"}},
        "service_tier": "auto", "max_output_tokens": 2, "background": False, "tool_choice": "auto", "tools": [],
    }  # fmt: skip
    response = served.post("/v1/responses", body)
    assert response.status_code == 200, response.text
