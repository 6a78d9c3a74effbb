"""Prompts that an engine takes: texts, chat messages, token ids; others are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_answers import alone
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
