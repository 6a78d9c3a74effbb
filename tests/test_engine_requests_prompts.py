"""Prompts that an engine takes: texts, chat messages, token ids; others are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_answers import alone, answers
from families import BY_NAME, build

from hf_paged import demo
from hf_paged.engine import Engine

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def stories() -> Engine:
    return Engine(demo.model(), demo.tokenizer(), num_blocks=200)


def test_text_chat_and_ids(stories: Engine) -> None:
    """A text, messages, a list, a tensor: the same tokens as the tokenizer makes."""
    tokenizer = stories.tokenizer
    text, chat = "The old bear slept", [{"role": "user", "content": "Tell me about the moon."}]
    template = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    for prompt, ids in (
        (text, tokenizer(text)["input_ids"]),
        (chat, template),
        (torch.tensor([[5, 6, 7]]), [5, 6, 7]),
        ((5, 6), [5, 6]),
    ):
        output = stories.generate([prompt], **GREEDY)[0]
        assert output.prompt_token_ids == list(ids)
        assert output.sequences[0].token_ids == alone(stories.model, list(ids), **GREEDY)[0]
        assert output.text == tokenizer.decode(output.sequences[0].token_ids, skip_special_tokens=True)


MOON = [{"role": "user", "content": "Tell me about the moon."}]


def test_a_chat(stories: Engine) -> None:
    """One conversation, or a list of them, as its template writes it."""
    ids = stories.tokenizer.apply_chat_template(MOON, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    expected = alone(stories.model, ids, **GREEDY)
    for output in (
        stories.chat(MOON, **GREEDY),
        stories.chat(tuple(MOON), **GREEDY),
        stories.generate(MOON, **GREEDY),
    ):
        assert answers(output) == expected
    owl = [{"role": "user", "content": "Where is the owl?"}]
    outputs = stories.chat([MOON, owl], **GREEDY)
    assert answers(outputs[0]) == expected
    assert answers(outputs[1]) == answers(stories.chat(owl, **GREEDY))
    begun = [*owl, {"role": "assistant", "content": "The owl is"}]
    assert (
        stories.chat(begun, continue_final_message=True, **GREEDY).prompt_token_ids[-3:]
        == (stories.tokenizer("The owl is", add_special_tokens=False)["input_ids"])
    )


TEMPLATE = "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}{{ tone }} {{ messages[0]['content'] }}"


def test_a_chats_template_gets_tools_and_its_own_keywords(stories: Engine) -> None:
    """Functions come as schemas; a template of the caller's takes the tokenizer's place."""

    def fox(color: str) -> str:
        """Find a fox.

        Args:
            color: of its fur
        """
        return color

    schema = {"type": "function", "function": {"name": "owl", "parameters": {}}}
    output = stories.chat(
        MOON, tools=[fox, schema], chat_template=TEMPLATE, chat_template_kwargs={"tone": "kind"}, **GREEDY
    )
    ids = stories.tokenizer("fox owl kind Tell me about the moon.", add_special_tokens=False)["input_ids"]
    assert output.prompt_token_ids == ids


@pytest.mark.parametrize("messages", ["Hello", MOON[0], [], ["Hello"], [MOON, "Hello"], 5])
def test_what_is_no_chat(stories: Engine, messages: Any) -> None:
    with pytest.raises(TypeError, match=r"chat\(\) takes messages like .* got"):
        stories.chat(messages)


def test_a_failed_chat_names_the_callers_line(stories: Engine) -> None:
    """The warning stands where the caller asked, however many functions of the engine lie between."""
    with pytest.warns(UserWarning, match="1 of 1 requests have no complete answer") as caught:
        stories.chat(MOON, max_new_tokens=8, stopping_criteria=[broken])
    assert caught[0].filename == __file__


def broken(ids: torch.Tensor, scores: torch.Tensor) -> bool:
    raise RuntimeError("a criterion of the user's")


@pytest.mark.parametrize("message", [{"text": "hi"}, {"role": "user"}, {"role": "user", "content": 3}])
def test_messages_that_the_template_cannot_render(stories: Engine, message: dict[str, Any]) -> None:
    """The error shows them, and what one looks like; the template's own names neither."""
    with pytest.raises(ValueError, match="the chat template cannot render") as caught:
        stories.submit([message], max_new_tokens=2)
    assert str(message) in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("text", "needs a tokenizer"),
        ([], "empty"),
        ([[1, 2], [3, 4]], "one sequence"),
        ([1.5], "one sequence"),
        (b"text", "one sequence"),
        ([5, 96], "token id 96 .* from 0 to 95"),
        ([-1, 5], "token id -1 .* from 0 to 95"),
        (None, "needs a prompt"),
        ({"input_ids": [5, 6]}, 'give its "input_ids"'),
        (np.array([[5, 6], [7, 8]]), "one sequence"),
        (np.array([True, False]), "one sequence"),
        (np.array(5), "one sequence"),
    ],
)
def test_other_prompts_are_refused(engine: Engine, prompt: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        engine.submit(prompt)


def test_ids_that_an_encoder_decoder_does_not_know() -> None:
    with Engine(build(BY_NAME["bart"]), num_blocks=40) as engine:
        with pytest.raises(ValueError, match="token id 96"):
            engine.submit([5, 96], **GREEDY)
        with pytest.raises(ValueError, match="token id -7"):
            engine.submit([5, 6], decoder_input_ids=[-7], **GREEDY)
        assert engine.generate([[5, 6]], **GREEDY)[0].finish_reason in ("stop", "length")
