"""The calls of a comparison: each from the same random state, with processors as the user gave them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from families import VOCABULARY

from hf_paged.checking.runs import Runs

SAMPLED = {"do_sample": True, "max_new_tokens": 5, "min_new_tokens": 5}


class Counts(tf.LogitsProcessor):
    """Forbids a token from its third call on, so that an answer shows how many calls it had before."""

    calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.arange(self.calls), -torch.inf)


def test_each_call_draws_the_same_and_leaves_what_was(llama: Any, ids: torch.Tensor) -> None:
    llama.train()
    before = torch.get_rng_state()
    with Runs(llama, ids, SAMPLED) as runs:
        found = [runs.answer(paged, scores=False) for paged in (False, True, False)]
    assert all(torch.equal(each.sequences, found[0].sequences) for each in found)
    assert {each.begin for each in found} == {ids.shape[1]}
    assert torch.equal(torch.get_rng_state(), before)
    assert llama.training


def test_a_processor_of_the_user_is_new_in_each_call(llama: Any, ids: torch.Tensor) -> None:
    own = Counts()
    with Runs(llama, ids, {**SAMPLED, "logits_processor": [own]}) as runs:
        first, second = (runs.answer(paged, scores=False).sequences for paged in (False, True))
    assert torch.equal(first, second)
    assert own.calls == 0


def test_logits_at_the_places_that_are_asked_for(llama: Any, ids: torch.Tensor) -> None:
    tokens = torch.randint(5, VOCABULARY, (3, 4), generator=torch.Generator().manual_seed(1))
    with Runs(llama, ids, {"max_new_tokens": 5, "do_sample": False}) as runs:
        found = [runs.follow(tokens, {0: 0, 1: 3, 2: 2}, paged) for paged in (False, True)]
    whole = llama(torch.cat([ids, tokens], 1)).logits
    for each in found:
        assert each.keys() == {0, 1, 2}
        for row, place in ((0, 0), (1, 3), (2, 2)):
            torch.testing.assert_close(each[row], whole[row, ids.shape[1] - 1 + place], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("of_the_model", [False, True])
def test_stocks_calls_are_stocks(llama: Any, ids: torch.Tensor, of_the_model: bool) -> None:
    """The word for pages stays in the config that has it."""
    config = llama.generation_config if of_the_model else tf.GenerationConfig(max_new_tokens=4)
    config.cache_implementation = "paged"
    options = {"max_new_tokens": 4} if of_the_model else {"generation_config": config}
    with Runs(llama, ids, options) as runs:
        caches = [
            runs.generate(paged, lambda ids, scores: scores)["past_key_values"] for paged in (False, True)
        ]
    assert [type(each).__name__ for each in caches] == ["DynamicCache", "PagedCache"]
    assert config.cache_implementation == "paged"


def test_a_cache_is_refused(llama: Any, ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="past_key_values is filled by the first of the two calls"):
        Runs(llama, ids, {"past_key_values": tf.DynamicCache()})
