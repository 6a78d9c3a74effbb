"""Python's garbage collector waits for the end of a step, and is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_answers import PROMPTS

from hf_paged.engine import Engine


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("on", [True, False])
def test_no_collection_runs_within_a_step(on: bool, llama: Any) -> None:
    (gc.enable if on else gc.disable)()
    seen = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        return scores

    with Engine(llama, block_size=4) as engine:
        handle = engine.submit(PROMPTS[0], max_new_tokens=3, logits_processor=[look])
        while not handle.done:
            engine.step()
            assert gc.isenabled() is on
    assert len(seen) == 3
    assert not any(seen)


def test_an_interrupt_leaves_it_as_it_was(llama: Any) -> None:
    def interrupted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with Engine(llama, block_size=4) as engine:
        handle = engine.submit(PROMPTS[0], max_new_tokens=3, logits_processor=[interrupted])
        with pytest.raises(KeyboardInterrupt):
            handle.result()
        assert gc.isenabled()
