"""Batches of transformers' continuous batching that the engine computes, and the answers of generate()."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from computed_once import computed_once
from families import BY_NAME, build
from processes import LIMIT
from releases import NEEDS_MANAGERS
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_paged
from hf_paged.continuous.engines import drop_engine

if TYPE_CHECKING:
    from hf_paged.continuous.manager import EngineBatchingManager

if NEEDS_MANAGERS.args[0]:
    pytest.skip(NEEDS_MANAGERS.kwargs["reason"], allow_module_level=True)

NEW = 6
PAGE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
SMALL = {PAGE: 4, "num_blocks": 60}
GUARD = LIMIT


@pytest.fixture(name="model")
def batching_model() -> Iterator[Any]:
    """A tiny Llama whose batches the engine computes."""
    made = build(BY_NAME["llama"])
    made.generation_config.pad_token_id = 0
    hf_paged.install(generate_batch=True)
    yield made
    made.destroy_cached_continuous_batching_manager()
    drop_engine(made)  # else both stay, and every later test checks their pools
    hf_paged.install(generate_batch=False)


def greedy(**options: Any) -> GenerationConfig:
    return GenerationConfig(
        **{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **options}
    )


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    config = greedy(**options)
    config.eos_token_id = None

    def compute() -> list[int]:
        ids = torch.tensor([prompt])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return found[0, len(prompt) :].tolist()

    return computed_once(compute, model, prompt, options)


def manager_of(model: Any, **options: Any) -> EngineBatchingManager:
    from hf_paged.continuous.manager import EngineBatchingManager

    config = ContinuousBatchingConfig(**{**SMALL, **options})
    manager = model.init_continuous_batching(greedy(), continuous_batching_config=config)
    assert isinstance(manager, EngineBatchingManager)
    return manager
