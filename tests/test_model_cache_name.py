"""The two names of a cache in generate(): every release takes the newer one, and answers with it."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from families import BY_NAME, build
from generate_calls import call
from prefix_reuse import words
from releases import RENAMED
from transformers import DynamicCache

import hf_paged

IDS = words(2, 9)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build(BY_NAME["llama"])


@pytest.mark.parametrize("kind", ["paged", "stock"])
def test_a_cache_is_passed_as_cache_in_every_release(llama: Any, kind: str) -> None:
    cache: Any = hf_paged.PagedCache(llama) if kind == "paged" else DynamicCache(config=llama.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        first = llama.generate(**call(IDS), cache=cache)
        more = torch.cat([first, IDS[:, :4]], 1)
        assert torch.equal(llama.generate(**call(more), cache=cache), llama.generate(**call(more)))
    assert cache.get_seq_length() == more.shape[1] + 7


def test_an_answer_has_its_cache_under_both_names(llama: Any) -> None:
    answer = llama.generate(**call(IDS), cache_implementation="paged", return_dict_in_generate=True)
    assert isinstance(answer.cache, hf_paged.PagedCache)
    assert answer.past_key_values is answer.cache


def test_the_older_name_has_one_warning_with_the_callers_line(llama: Any) -> None:
    """From the release on that has renamed it."""
    cache = hf_paged.PagedCache(llama)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        answer = llama.generate(**call(IDS), past_key_values=cache)
    assert torch.equal(answer, llama.generate(**call(IDS)))
    found = [each for each in caught if issubclass(each.category, FutureWarning)]
    assert [(each.filename, each.lineno) for each in found] == [(__file__, line)] * RENAMED
    assert all("Use `cache` instead" in str(each.message) for each in found)


def test_two_caches_are_refused_or_the_newer_one_is_taken(llama: Any) -> None:
    """As stock does in the same release."""
    caches = {"cache": hf_paged.PagedCache(llama), "past_key_values": hf_paged.PagedCache(llama)}
    if RENAMED:
        with pytest.warns(FutureWarning, match="Both `past_key_values` and `cache` are set"):
            llama.generate(**call(IDS), **caches)
        assert [cache.get_seq_length() > 0 for cache in caches.values()] == [True, False]
    else:
        with pytest.raises(ValueError, match="not used by the model: \\['cache'\\]"):
            llama.generate(**call(IDS), **caches)
