"""Models that are left to stock's cache, by what their code does with a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
import transformers as tf
from compare import assert_clean, both
from families import BY_NAME, build
from prefix_reuse import words
from releases import NEEDS_SLOTS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_paged import Engine, FallbackWarning
from hf_paged.model.cache_name import cache_in
from hf_paged.model.servable import Unservable

CALL = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


class Looped(tf.LlamaModel):
    """Its layers may run in loops, each with keys and values of its own at the end of the cache."""

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None and len(past_key_values.layers) == len(self.layers):
            past_key_values.layers += [copy.deepcopy(layer) for layer in past_key_values.layers]
        return super().forward(*args, past_key_values=past_key_values, **kwargs)


def left_to_stock(model: Any, reason: str, **mode: Any) -> None:
    ids = words(2, 9)
    call = {**CALL, **mode, "attention_mask": torch.ones_like(ids)}
    with pytest.warns(FallbackWarning, match=reason):
        paged = model.generate(ids, **call, cache_implementation="paged")
    assert torch.equal(paged, model.generate(ids, **call))
    with pytest.raises(Unservable, match=reason):
        Engine(model)


@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}], ids=str)
def test_a_model_that_adds_layers_to_its_cache(mode: dict[str, Any]) -> None:
    model = build(BY_NAME["llama"])
    model.model.__class__ = Looped
    left_to_stock(model, "adds layers to its cache", **mode)


@pytest.mark.parametrize("name", [name for name in ("dory", "inkling2_loop_text") if name in CONFIG_MAPPING])
def test_families_that_loop_over_their_layers(name: str) -> None:
    """transformers 5.24 has them."""
    left_to_stock(tiny.build("causal", tiny.config_class("causal", name)), "adds layers to its cache")


def _prompt() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 80, (2, 9), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@NEEDS_SLOTS
def test_a_name_decides_nothing() -> None:
    """A hybrid of the user's that is called Mamba has attention layers, which are paged."""
    config = tiny.config_class("causal", "jamba")
    base: Any = tiny.model_class_of("causal", config)
    model = tiny.build_class(type("OwnMambaForCausalLM", (base,), {}), config, "causal")
    setting = model.config._attn_implementation
    stock, paged = both(model, **_prompt(), max_new_tokens=5, num_beams=3, return_dict_in_generate=True)
    assert torch.equal(stock.sequences, paged.sequences)
    assert cache_in(paged).paths == ["stock", "paged", "stock", "paged"]
    del stock, paged
    assert_clean(model, setting)


def test_states_of_the_models_own_stay_with_stock() -> None:
    """One warning, with the reason."""
    model = tiny.build("causal", tiny.config_class("causal", "rwkv"))
    given = {**_prompt(), "max_new_tokens": 4, "do_sample": False}
    with pytest.warns(FallbackWarning) as said:
        paged = model.generate(**given, cache_implementation="paged")
    texts = [str(each.message) for each in said if each.category is FallbackWarning]
    assert len(texts) == 1
    assert f"{type(model).__name__} keeps a state of its own instead of keys and values" in texts[0]
    assert torch.equal(paged, model.generate(**given))
