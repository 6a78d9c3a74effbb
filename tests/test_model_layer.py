"""One layer of a paged cache, as the model sees it: what it answers, and updates that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.model.lazy import LazyPages


@pytest.fixture
def cache(llama: Any) -> hf_paged.PagedCache:
    return hf_paged.PagedCache(llama)


def states(model: Any, new: int, rows: int = 2) -> torch.Tensor:
    """Keys, or values, of a layer [rows, heads, new, dim]."""
    config = model.config
    dim = config.hidden_size // config.num_attention_heads
    return torch.randn(rows, config.num_key_value_heads, new, dim)


def test_an_update_answers_with_a_view_of_all_tokens(llama: Any, cache: hf_paged.PagedCache) -> None:
    """It has the shape and the content of stock's answer, and the step's own keys are written."""
    layer = cache.layers[0]
    stored = [(states(llama, new), states(llama, new)) for new in (3, 2)]
    for place, (keys, values) in enumerate(stored):
        found = layer.update(keys, values)
        for each, own in zip(found, zip(*stored[: place + 1], strict=True), strict=True):
            assert isinstance(each, LazyPages)
            expected = torch.cat(own, 2)
            assert each.shape == expected.shape
            assert torch.equal(each + 0, expected)
        for other in cache.layers[1:]:
            other.update(keys, values)
    assert layer.columns == layer.get_seq_length() == 5


def test_layers_of_one_kind_hold_the_same_tokens(llama: Any, cache: hf_paged.PagedCache) -> None:
    cache.layers[0].update(states(llama, 3), states(llama, 3))
    for other in (states(llama, 2), states(llama, 3, rows=1)):
        with pytest.raises(RuntimeError, match=r"layer 1 holds 0 tokens and was given .* other layers"):
            cache.layers[1].update(other, other)


def test_gradients_are_not_kept(llama: Any, cache: hf_paged.PagedCache) -> None:
    keys = states(llama, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="a paged cache keeps no gradients"):
        cache.layers[0].update(keys, keys)
