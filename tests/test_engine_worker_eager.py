"""The forward of an eager step."""

from __future__ import annotations

import pytest
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, build

from hf_paged.engine import Engine

GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.mark.parametrize("setting", ["eager", "sdpa"])
def test_softcap_is_what_stock_makes_of_it(setting: str) -> None:
    """Stock's sdpa drops it and eager applies it; the flat row does the same."""
    model = build(BY_NAME["gemma2"])
    try:
        model.set_attn_implementation(setting)
    except ValueError as refusal:
        pytest.skip(f"this transformers refuses it: {refusal}")
    with Engine(model, block_size=4, num_blocks=60, max_batch_tokens=11) as engine:
        assert engine.stats()["form"] == "flat"
        assert [answers(output) for output in engine.generate(PROMPTS, **GREEDY)] == [
            alone(model, prompt, **GREEDY) for prompt in PROMPTS
        ]
