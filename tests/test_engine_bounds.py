"""Requests that an engine could never compute are refused, with the numbers and the option to change (C11)."""

from __future__ import annotations

import warnings

import pytest
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME

from hf_paged.engine import Engine

GREEDY = {"max_new_tokens": 8, "do_sample": False}


def test_long_rope_has_its_border() -> None:
    """Beyond it one request would turn its neighbours' positions: the border is the longest that is taken."""
    family = BY_NAME["phi3"].build().config
    family.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    family.original_max_position_embeddings = 32
    model = type(BY_NAME["phi3"].build())(family).eval()
    with Engine(model, num_blocks=40) as engine:
        assert engine.generate([PROMPTS[3]], **GREEDY)[0].finish_reason == "refused"
        assert answers(engine.generate([PROMPTS[1]], **GREEDY)[0]) == alone(model, PROMPTS[1], **GREEDY)


TOO_LONG = [5] * 250


def test_more_sequences_than_run_at_once_name_the_option(engine: Engine) -> None:
    """C11."""
    output = engine.submit(PROMPTS[0], max_new_tokens=3, num_beams=9).result()
    assert output.finish_reason == "refused"
    assert "lower num_beams or num_return_sequences, or raise max_batch_sequences" in str(output.error)


def test_a_prompt_that_is_too_long_is_no_silent_empty_answer(engine: Engine) -> None:
    """C11: its neighbours have theirs, and a warning says which one has none and why; the rest is in its
    output.
    """
    prompts = [PROMPTS[0], TOO_LONG, PROMPTS[1], TOO_LONG]
    said = r"2 of 4 requests .*: prompts\[1\] ended as 'refused', Infeasible: .* 258 tokens.*strict=True"
    with pytest.warns(UserWarning, match=said) as seen:
        outputs = engine.generate(prompts, **GREEDY)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert [output.finish_reason for output in outputs] == ["length", "refused", "length", "refused"]
    assert answers(outputs[0]) == alone(engine.model, PROMPTS[0], **GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(prompts[::2], **GREEDY)
        engine.generate(prompts[::2], **GREEDY, strict=True)
