"""The cache that a model is given for one step of the engine: it says where its tokens are, and keeps none."""

from __future__ import annotations

import copy

import pytest
from families import BY_NAME, build

from hf_paged.engine import EngineConfig
from hf_paged.engine.worker.cache import StepCache
from hf_paged.engine.worker.pools import Pools


def test_a_step_begins_behind_its_past() -> None:
    """Masks of layers with a window begin where it does; keys and values are not read by a model."""
    pools = Pools(build(BY_NAME["qwen2-window"]), EngineConfig(block_size=4, num_blocks=20))
    cache = StepCache(pools)
    cache.begin({}, past=11)
    for layer in cache.layers:
        kept = layer.kind.kept(11)
        assert (layer.get_seq_length(), layer.get_mask_sizes(2)) == (11, (kept + 2, 11 - kept))
        assert layer.is_initialized
    assert {layer.kind.kept(11) for layer in cache.layers} > {11}
    cache.begin({})
    assert not any(layer.is_initialized for layer in cache.layers)
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.deepcopy(cache)
    pools.free()
