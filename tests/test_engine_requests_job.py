"""A request under way: what it has said, and what its own code is shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, build
from transformers import StoppingCriteria

from hf_paged.engine import Engine

GREEDY = {"max_new_tokens": 9, "do_sample": False}


@pytest.fixture
def engine() -> Engine:
    options = {"block_size": 4, "num_blocks": 60, "max_batch_tokens": 24, "max_batch_sequences": 8}
    return Engine(build(BY_NAME["llama"]), **options, run_ahead=True)


def test_who_fails_in_the_middle_keeps_what_it_has_said(engine: Engine) -> None:
    """Its last token is heard of before it ends."""
    model = engine.model
    handle, other = (engine.submit(PROMPTS[i], **GREEDY) for i in (1, 2))
    for _ in range(4):
        engine.step()
    forward, calls = model.lm_head.forward, iter([1, 1, 0, 1])  # all together, the first alone, the second

    def fails_once(hidden: torch.Tensor) -> torch.Tensor:
        if next(calls, 0):
            raise ValueError("not now")
        return forward(hidden)

    model.lm_head.forward = fails_once
    engine.step()
    model.lm_head.forward = forward
    assert [str(handle.result().error), other.done] == ["not now", False]
    assert [handle.result().sequences[0].token_ids] == [alone(model, PROMPTS[1], **GREEDY)[0][:4]]
    assert answers(other.result()) == alone(model, PROMPTS[2], **GREEDY)
    engine.check()


class Notes(StoppingCriteria):
    """Writes down what it is shown, and stops at a length."""

    def __init__(self, stop: int) -> None:
        self.stop, self.seen = stop, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.stop)


def test_a_criterion_sees_what_it_sees_in_generate(engine: Engine) -> None:
    """Though by then the next token is on its way."""
    mine, stock = Notes(16), Notes(16)
    output = engine.submit(PROMPTS[2], max_new_tokens=20, do_sample=False, stopping_criteria=[mine]).result()
    assert answers(output) == alone(
        engine.model, PROMPTS[2], max_new_tokens=20, do_sample=False, stopping_criteria=[stock]
    )
    assert mine.seen == stock.seen
