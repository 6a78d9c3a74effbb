"""A model's memory goes with the model: at once, not with the next collection of garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_parts import thread_of
from families import BY_NAME, build
from processes import LIMIT

from hf_paged.engine import Engine
from hf_paged.model.registry import memory_of

IDS = torch.arange(5, 12)[None]
CALL = {"cache_implementation": "paged", "max_new_tokens": 4, "do_sample": False}


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pools_of(model: Any) -> list[weakref.ref[torch.Tensor]]:
    """The tensors that hold keys and values."""
    found = [weakref.ref(data) for group in memory_of(model).groups.values() for data in group.tensors]
    assert found
    return found


def test_behind_a_call() -> None:
    model = build(BY_NAME["llama"])
    model.generate(IDS, **CALL)
    gone = weakref.ref(model)
    pools = pools_of(model)
    del model
    assert gone() is None
    assert not any(each() is not None for each in pools)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("thread", [False, True])
def test_behind_an_engine(closed: bool, thread: bool) -> None:
    model = build(BY_NAME["llama"])
    engine = Engine(model, block_size=4, num_blocks=40)
    if thread:
        engine.start()
    driver = thread_of(engine).thread if thread else None
    engine.generate([[5, 6, 7]], max_new_tokens=3)
    gone = weakref.ref(model)
    pools = pools_of(model)
    if closed:
        engine.close()
    del engine, model
    if driver is not None:
        driver.join(LIMIT)
    assert gone() is None
    assert not any(each() is not None for each in pools)


def test_a_cache_that_is_kept_stays_whole() -> None:
    model = build(BY_NAME["llama"])
    cache = model.generate(IDS, return_dict_in_generate=True, **CALL).past_key_values
    before = torch.as_tensor(cache.layers[0].keys).clone()
    pools = pools_of(model)
    del model
    assert torch.equal(torch.as_tensor(cache.layers[0].keys), before)
    del cache
    gc.collect()
    assert not any(each() is not None for each in pools)
