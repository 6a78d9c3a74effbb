"""/v1/chat/completions, /tokenize and /detokenize: chats through the tokenizer's template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serving import Served, serving, text, tokenizer

PATH = "/v1/chat/completions"
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Tell me a story"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


def rendered(messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer().apply_chat_template(
        messages, tokenize=False, **{"add_generation_prompt": True, **options}
    )


def wanted(tokens: int, messages: list[dict[str, Any]] = CHAT, **options: Any) -> list[int]:
    import torch
    from serving import model

    ids = tokenizer()(rendered(messages, **options), add_special_tokens=False, return_tensors="pt")[
        "input_ids"
    ]
    found = model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return found[0, ids.shape[1] :].tolist()


def chat(served: Served, **body: Any) -> dict[str, Any]:
    response = served.post(PATH, {"messages": CHAT, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_chat_is_answered_as_generate_does(served: Served) -> None:
    found = chat(served, max_tokens=10)
    assert found["object"] == "chat.completion"
    choice = found["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text(wanted(10)), "refusal": None}
    assert chat(served, max_completion_tokens=4)["usage"]["completion_tokens"] == 4


def test_a_stream_begins_with_the_role(served: Served) -> None:
    chunks = served.stream(PATH, messages=CHAT, max_tokens=10, stream_options={"include_usage": True})
    deltas = [each["choices"][0]["delta"] for each in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(each.get("content", "") for each in deltas) == text(wanted(10))
    assert {each["object"] for each in chunks} == {"chat.completion.chunk"}
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 10


def test_without_a_length_a_chat_may_take_all_the_room(served: Served) -> None:
    found = chat(served)
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["choices"][0]["message"]["content"] == text(wanted(400))


def test_contents_in_parts(served: Served) -> None:
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story"}]
    found = chat(served, messages=[CHAT[0], {"role": "user", "content": parts}], max_tokens=8)
    assert found["choices"][0]["message"]["content"] == text(wanted(8))


def test_a_message_is_continued(served: Served) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Once upon a"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    found = chat(served, messages=messages, max_tokens=8, **options)
    assert found["choices"][0]["message"]["content"] == text(wanted(8, messages, **options))


def test_logprobs_of_chats(served: Served) -> None:
    content = chat(served, max_tokens=5, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for each in content:
        assert each["logprob"] == pytest.approx(each["top_logprobs"][0]["logprob"])
        assert bytes(each["bytes"]).decode() == each["token"]
        assert len(each["top_logprobs"]) == 2
    assert (
        chat(served, max_tokens=2, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        == []
    )


def test_several_answers(served: Served) -> None:
    found = chat(served, max_tokens=8, n=2, temperature=1.0, seed=1)
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    chunks = served.stream(PATH, messages=CHAT, max_tokens=8, n=2, temperature=1.0, seed=1)
    for choice in found["choices"]:
        pieces = [
            c["delta"]["content"] for each in chunks for c in each["choices"] if c["index"] == choice["index"]
        ]
        assert "".join(pieces) == choice["message"]["content"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "function", "content": "x"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}
            ]
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": kind, kind: {"url": "data:video/jpeg;base64,AAAA"}}]}
                for kind in ("video_url", "audio_url", "input_audio")
            ]
        },
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "a", "tool_calls": []}]},
        {"messages": CHAT, "top_logprobs": 2},
        {"messages": CHAT, "max_tokens": 0},
        {"messages": CHAT, "chat_template": "{{ 1 }}"},
        {"messages": CHAT, "chat_template_kwargs": {"chat_template": "x"}},
        {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}},
        {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
        {"messages": CHAT, "echo": True},
        {"messages": CHAT, "prompt": "a"},
        {},
    ],
)
def test_refused_chats(served: Served, body: dict[str, Any]) -> None:
    error = served.refusal(PATH, **body)
    assert error["type"] == "invalid_request_error"
    assert error["param"]


def test_tokenize_and_back(served: Served) -> None:
    ids = tokenizer()("The fox")["input_ids"]
    found = served.post("/tokenize", {"prompt": "The fox", "return_token_strs": True}).json()
    assert found["tokens"] == ids
    assert found["count"] == len(ids)
    assert found["max_model_len"] == served.service.longest
    assert "".join(found["token_strs"]) == tokenizer().decode(ids)
    assert served.post("/detokenize", {"tokens": ids}).json() == {"prompt": tokenizer().decode(ids)}
    bare = served.post("/detokenize", {"tokens": ids, "skip_special_tokens": True}).json()
    assert bare == {"prompt": text(ids)}
    both = served.post("/tokenize", {"prompt": "The fox", "messages": CHAT}).json()["error"]["message"]
    assert both == "prompt and messages are both what is tokenized; give one of them"
    chats = served.post("/tokenize", {"messages": CHAT}).json()["tokens"]
    assert chats == tokenizer()(rendered(CHAT), add_special_tokens=False)["input_ids"]
    assert served.post("/detokenize", {"tokens": [10**6]}).status_code == 400
    assert served.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_a_call_of_a_tool_without_content_is_taken(served: Served) -> None:
    """openai-python's own form of an assistant's message: its content is left out, or null."""
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "x", "content": "5"}
    for message in (said, {**said, "content": None}):
        messages = [CHAT[1], message, result]
        assert chat(served, messages=messages, max_tokens=3)["usage"]["completion_tokens"] == 3
