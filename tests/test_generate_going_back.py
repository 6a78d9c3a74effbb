"""Kept caches with recurrent states that are cropped: as the shorter text from the beginning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from poison import poison_free_slots
from prefix_reuse import words as any_words
from releases import NEEDS_SLOTS
from tiny import build, config_class

import hf_paged
from hf_paged import PagedCache
from hf_paged.model.registry import memory_of

pytestmark = NEEDS_SLOTS
NEW = {"max_new_tokens": 6, "do_sample": False}


def words(*shape: int, seed: int = 5) -> torch.Tensor:
    return any_words(*shape, seed=seed) % 75 + 5


def make(family: str = "qwen3_5_text") -> Any:
    model = build("causal", config_class("causal", family))
    model.generation_config.eos_token_id = None
    return model


def told(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    answer: torch.Tensor = model.generate(ids, attention_mask=mask, past_key_values=cache, **NEW)
    return answer


@pytest.mark.parametrize(
    ("family", "padded"),
    [("qwen3_5_text", True), ("nemotron_h", False), ("mamba2", False), ("falcon_h1", True), ("lfm2", False)],
)
def test_a_cache_is_cropped_to_any_length(family: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By copies of it, and by itself in the end. Rows without padding begin behind their last snapshot."""
    poison_free_slots(monkeypatch)
    model = make(family)
    ids = words(2, 30)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, : 5 * padded] = 0
    cache = PagedCache(model, block_size=4, prefix_caching=True, state_every=16)
    said = told(model, cache, ids, mask[:, :30])
    computed = {}
    for length in (33, 30, 29, 7, 1):
        kept = cache if length == 1 else copy.deepcopy(cache)
        before = hf_paged.stats(model).computed
        kept.crop(length)
        computed[length] = hf_paged.stats(model).computed - before
        assert kept.get_seq_length() == length
        longer = torch.cat([said[:, :length], words(2, 4, seed=length)], 1)
        answer = told(model, kept, longer, mask[:, : length + 4])
        assert torch.equal(answer, model.generate(longer, attention_mask=mask[:, : length + 4], **NEW))
        memory_of(model).check()
    if not padded:
        assert computed == {33: 6, 30: 60, 29: 26, 7: 14, 1: 2}


def test_rows_that_were_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_free_slots(monkeypatch)
    model = make()
    cache = PagedCache(model, block_size=4, prefix_caching=True)
    said = told(model, cache, words(3, 20))
    cache.batch_select_indices([2, 0, 2, 1])
    cache.crop(-4)
    longer = torch.cat([said[[2, 0, 2, 1], :21], words(4, 4)], 1)
    assert torch.equal(
        told(model, cache, longer), model.generate(longer, attention_mask=torch.ones_like(longer), **NEW)
    )


def test_a_cache_that_cannot_is_as_it_was() -> None:
    """With the reason: tokens that nobody has noted, and a model that has changed."""
    model = make()
    ids = words(1, 20)
    plain = PagedCache(model, block_size=4)
    said = told(model, plain, ids)
    with pytest.raises(RuntimeError, match=r"go back 5 tokens: .* prefix_caching=True keeps them; use a new"):
        plain.crop(20)
    filled = PagedCache(model, block_size=4, prefix_caching=True)
    with torch.no_grad():
        model(ids, past_key_values=filled)
    with pytest.raises(RuntimeError, match="other inputs than tokens in calls of generate"):
        filled.crop(15)
    longer = torch.cat([said, words(1, 4)], 1)
    wanted = model.generate(longer, attention_mask=torch.ones_like(longer), **NEW)
    assert torch.equal(told(model, plain, longer), wanted)
    cache = PagedCache(model, block_size=4, prefix_caching=True)
    told(model, cache, ids)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="the model has changed since the cache was begun"):
        cache.crop(15)
    assert cache.get_seq_length() == 25
    memory_of(model).check()


def test_a_failure_leaves_the_cache_as_it_was() -> None:
    model = make()
    cache = PagedCache(model, block_size=4, prefix_caching=True)
    said = told(model, cache, words(1, 20))

    def fail(*_: Any) -> None:
        raise RuntimeError("no luck")

    with model.model.layers[1].register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="no luck"):
        cache.crop(15)
    memory_of(model).check()
    longer = torch.cat([said, words(1, 4)], 1)
    answer = told(model, cache, longer)
    assert torch.equal(answer, model.generate(longer, attention_mask=torch.ones_like(longer), **NEW))
