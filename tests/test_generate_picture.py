"""The picture of a cache: the blocks of its rows, and nothing is forked for it."""

from __future__ import annotations

import re

import pytest
import torch
from families import BY_NAME, build

from hf_paged import PagedCache
from hf_paged.model.cache_name import CACHE


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_cache_shows_the_blocks_of_its_rows(name: str) -> None:
    """Held, shared and free ones are counted as the tables have them; other caches' blocks are others'."""
    model = build(BY_NAME[name])
    cache = PagedCache(model, block_size=2, num_blocks=40)
    other = PagedCache(model, block_size=2, num_blocks=40)
    model(input_ids=torch.arange(5, 10)[None], past_key_values=other)
    model(input_ids=torch.arange(5, 12)[None], past_key_values=cache)
    cache.batch_repeat_interleave(3)
    html = cache._repr_html_()
    assert "PagedCache(rows=3, tokens=7, block_size=2" in html
    assert "the keys and values of 2 tokens" in html
    assert "of others" in html
    pools = [rows.group.pool for rows in cache.sequences.rows.values()]
    for pool, table in zip(
        pools, (cache.sequences.tables(kind)[0] for kind in cache.sequences.rows), strict=True
    ):
        assert f"{pool.held} held, {len(table.blocks)} shared, {pool.free} free" in html
    assert "row 2" in html
    assert not re.search(r"<script|\bon\w+=", html)
    assert PagedCache(model, block_size=2)._repr_html_()
    for pool in pools:
        pool.check()


def test_rows_that_are_not_forked_yet_stay_so() -> None:
    """Equal prompts are computed once; a look at them is no reason to fork."""
    model = build(BY_NAME["llama"])
    seen = []

    def look(module: torch.nn.Module, args: object, kwargs: dict[str, object]) -> None:
        cache = kwargs[CACHE]
        assert isinstance(cache, PagedCache)
        before = cache.sequences.sources
        seen.append(cache._repr_html_())
        assert cache.sequences.sources == before

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    ids = torch.arange(5, 12)[None].repeat(3, 1)
    arguments = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    paged = model.generate(ids, cache_implementation="paged", cache_config={"block_size": 2}, **arguments)
    handle.remove()
    assert torch.equal(paged, model.generate(ids, **arguments))
    assert "3 shared" in seen[-1] or "4 shared" in seen[-1]
