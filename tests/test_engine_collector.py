"""Python's garbage collector waits for the end of a step, and is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_answers import PROMPTS

from hf_paged.engine import Engine
from hf_paged.engine.collector import without_collections


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("on", [True, False])
def test_it_is_as_it_was(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    assert not without_collections(gc.isenabled)
    assert not without_collections(lambda: without_collections(gc.isenabled) or gc.isenabled())
    assert gc.isenabled() is on

    def interrupted() -> None:
        raise KeyboardInterrupt

    try:
        without_collections(interrupted)
    except KeyboardInterrupt:  # while the traceback lives
        assert gc.isenabled() is on
    else:
        pytest.fail("the interrupt was swallowed")


@pytest.mark.parametrize("on", [True, False])
def test_steps(on: bool, llama: Any) -> None:
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
