"""Rows of hf_paged.ray.map_batches beside each other on one engine: each has its own error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from hf_paged import Engine, demo
from hf_paged.ray.rows import RowAnswer, answered

PROMPTS = demo.prompts()


POISON = 400
"""A token at which the model below fails."""


GREEDY = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = demo.model()

    def choke(module: Any, args: tuple[Any, ...]) -> None:
        if (args[0] == POISON).any():
            raise RuntimeError("the model chokes")

    model.get_input_embeddings().register_forward_pre_hook(choke)
    with Engine(model, demo.tokenizer(), num_blocks=200, max_batch_sequences=16) as made:
        yield made


def ids(prompt: str) -> list[int]:
    return list(demo.tokenizer()(prompt)["input_ids"])


def expected(engine: Engine, prompt: Any) -> RowAnswer:
    (output,) = engine.generate([prompt], **GREEDY)
    return RowAnswer(output.text, output.finish_reason)


def test_a_row_has_its_own_error(engine: Engine) -> None:
    found = asyncio.run(
        answered(engine, [PROMPTS[0], None, [2] * 5000, PROMPTS[1], {"no": "prompt"}], GREEDY)
    )
    engine.stop()
    assert [found[0], found[3]] == [expected(engine, PROMPTS[0]), expected(engine, PROMPTS[1])]
    assert [found[i].finish_reason for i in (1, 2, 4)] == ["refused"] * 3
    assert all(found[i].error and found[i].text is None for i in (1, 4))
    assert "5003 tokens" in (found[2].error or "")


def test_a_step_that_fails_is_the_error_of_its_row(engine: Engine) -> None:
    """Two batches are under way: only the row with the poison has an error."""
    assert not any(POISON in ids(prompt) for prompt in PROMPTS)
    bad = [*ids(PROMPTS[0]), POISON]

    async def both() -> list[list[RowAnswer]]:
        return await asyncio.gather(
            answered(engine, [*PROMPTS[:3], bad], GREEDY), answered(engine, PROMPTS[3:6], GREEDY)
        )

    first, second = asyncio.run(both())
    engine.stop()
    assert [*first[:3], *second] == [expected(engine, prompt) for prompt in PROMPTS[:6]]
    assert first[3] == RowAnswer("", "error", "RuntimeError: the model chokes")
    engine.check()
