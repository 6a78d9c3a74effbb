"""Draws of a request: settled by its seed, and none where none are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, answers

from hf_paged.engine import Engine


def test_a_seed_settles_the_draws(engine: Engine) -> None:
    """C35; without a seed torch's generator gives one, so that torch.manual_seed settles it."""
    options = {"do_sample": True, "max_new_tokens": 12, "temperature": 2.0}
    assert answers(engine.submit(PROMPTS[0], seed=3, **options).result()) == answers(
        engine.submit(PROMPTS[0], seed=3, **options).result()
    )
    found = []
    for manual in (1, 1, 2):
        torch.manual_seed(manual)
        found.append(answers(engine.submit(PROMPTS[0], **options).result()))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("kind", [{}, {"num_beams": 2}, {"repetition_penalty": 1.3}])
def test_a_request_that_draws_nothing_leaves_torchs_generator(model: Any, kind: dict[str, Any]) -> None:
    """As stock and paged generate() do; one that draws takes a single number, and none if it has a seed."""
    state = torch.get_rng_state()
    engine = Engine(model, num_blocks=60)
    engine.submit(PROMPTS[0], max_new_tokens=3, do_sample=False, **kind).result()
    engine.submit(PROMPTS[0], max_new_tokens=3, do_sample=True, seed=1, **kind).result()
    assert torch.equal(state, torch.get_rng_state())
    engine.submit(PROMPTS[0], max_new_tokens=3, do_sample=True, **kind).result()
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randint(2**62, ())
    assert torch.equal(after, torch.get_rng_state())
    engine.check()
