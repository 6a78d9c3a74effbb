"""Models that are left to stock's cache, by what their code does with a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
import transformers as tf
from families import BY_NAME, build
from prefix_reuse import words
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_paged import Engine, FallbackWarning
from hf_paged.engine.support import Unservable

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


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
def test_a_model_without_keys_and_values(name: str) -> None:
    left_to_stock(tiny.build("causal", tiny.config_class("causal", name)), "keeps a state of its own")
