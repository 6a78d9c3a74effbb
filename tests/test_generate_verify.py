"""verify="bytes" in generate(): a byte that changes between two calls, or within one, is an error and no answer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import BY_NAME, build
from transformers import LogitsProcessor

import hf_paged
from hf_paged.blocks.pool import CACHED
from hf_paged.kv import LayerGroup
from hf_paged.kv.checksums import CorruptedBlock, flip_a_byte
from hf_paged.model.registry import memory_of

IDS = torch.tensor([[45, 77, 17, 61, 6, 30, 12, 9, 51, 33, 8, 70, 25, 14, 88, 40, 3, 66, 19, 5, 71, 28]])
GREEDY: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}


@pytest.fixture
def model() -> Iterator[Any]:
    found = build(BY_NAME["llama"])
    yield found
    memory_of(found).check()


def ask(model: Any, ids: torch.Tensor = IDS, **options: Any) -> list[list[int]]:
    config = {"block_size": 4, "verify": "bytes", **options.pop("cache_config", {})}
    return model.generate(
        ids, cache_implementation="paged", cache_config=config, **{**GREEDY, **options}
    ).tolist()


def pool_of(model: Any) -> LayerGroup:
    memory = memory_of(model)
    memory.drain()
    (group,) = memory.groups.values()
    return group


def flip(group: LayerGroup, block: int, layer: int = 0) -> None:
    flip_a_byte(*group.stores.values(), block, layer=layer)


def test_a_prefix_hit(model: Any) -> None:
    """C45: the call raises, and the next one computes the block anew."""
    expected = model.generate(IDS, **GREEDY).tolist()
    options = {"cache_config": {"prefix_caching": True}}
    assert ask(model, **options) == ask(model, **options) == expected
    group = pool_of(model)
    flip(group, group.pool.states().index(CACHED), layer=1)
    with pytest.raises(CorruptedBlock, match="found when the block was shared, first in layer 1"):
        ask(model, **options)
    assert ask(model, **options) == expected
    (stats,) = hf_paged.stats(model).pools
    assert (stats.mismatched, stats.held) == (1, 0)
    assert stats.checked > 5


def test_a_kept_cache_that_is_forked(model: Any) -> None:
    """The fork raises at its first step; the cache it was forked from, at its next one."""
    cache = hf_paged.PagedCache(model, block_size=4, verify="bytes")
    longer = model.generate(IDS, past_key_values=cache, **GREEDY)
    longer = torch.cat([longer, IDS[:, :2]], 1)
    flip(pool_of(model), cache.tables()[0][1])
    for kept in (copy.deepcopy(cache), cache):
        with pytest.raises(CorruptedBlock, match="found when the block was shared"):
            model.generate(longer, past_key_values=kept, **GREEDY)
    with pytest.raises(RuntimeError, match="use a new cache"):
        model.generate(longer, past_key_values=cache, **GREEDY)


class Flips(LogitsProcessor):
    """Changes a byte of every block in the middle of a call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 5:
            group = pool_of(self.model)
            for block in range(group.pool.top):
                flip(group, block)
        return scores


@pytest.mark.parametrize("beams", [3, 4])
def test_beams_share_and_copy(model: Any, beams: int) -> None:
    """Blocks that beams hand on are checked in each step; without a change the answer is stock's."""
    expected = model.generate(IDS, num_beams=beams, **GREEDY).tolist()
    options = {"num_beams": beams, "cache_config": {"block_size": 1}}
    assert ask(model, **options) == expected
    assert pool_of(model).pool.counts["checked"] > beams
    with pytest.raises(CorruptedBlock, match=r"found when the block was (shared|copied)"):
        ask(model, logits_processor=[Flips(model)], **options)
    assert ask(model, **options) == expected


def test_an_eviction_is_logged(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """No call holds the block, so none raises."""
    options = {"cache_config": {"prefix_caching": True, "num_blocks": 12}}
    ask(model, **options)
    group = pool_of(model)
    for block in range(group.pool.top):
        flip(group, block)
    other = IDS.flip(1)
    assert ask(model, other, **options) == model.generate(other, **GREEDY).tolist()
    assert group.pool.counts["mismatched"] == group.pool.counts["evictions"] > 0
    assert "found when the block was evicted" in caplog.text


@pytest.mark.parametrize("name", ["qwen2-window", "t5"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_no_false_alarm(name: str, prefix_caching: bool) -> None:
    """Windows, cross attention, samples, beams and drafts, over the same pools."""
    model = build(BY_NAME[name])
    ids = IDS[:, :13]
    modes: list[dict[str, Any]] = [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {} if name == "t5" else {"prompt_lookup_num_tokens": 3},
    ]
    for mode in [*modes, *modes]:
        expected = model.generate(ids, **{**GREEDY, **mode}).tolist()
        assert ask(model, ids, cache_config={"prefix_caching": prefix_caching}, **mode) == expected
    assert all(pool.mismatched == 0 for pool in hf_paged.stats(model).pools)
    memory_of(model).check()


def test_a_call_that_verifies_nothing_ends_the_checks_of_idle_pools(model: Any) -> None:
    ask(model)
    ask(model, cache_config={"verify": None})
    assert pool_of(model).pool.sealed is None
