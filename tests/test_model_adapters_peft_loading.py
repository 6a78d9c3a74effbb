"""Adapters that peft loads into a twin of a model: they fit or are refused, and the model stays as it is."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from adapters import lora
from other_methods import other_method, tiny_llama

from hf_paged.model.adapters.peft_loading import PeftAdapter

IDS = torch.arange(5, 14)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def test_the_model_shares_its_weights() -> None:
    """The twin has the model's parameters and the adapter's own, and their bytes are counted."""
    made = other_method("IA3", 1)
    state = peft.get_peft_model_state_dict(made, adapter_name="one")
    loaded = PeftAdapter(state, made.peft_config["one"], "IA3")
    model = tiny_llama()
    twin = loaded.twin(model, "x")
    assert torch.equal(logits(twin), logits(made))
    assert set(map(id, model.parameters())) <= set(map(id, twin.parameters()))
    assert loaded.bytes == sum(each.nbytes for each in state.values())
    again = PeftAdapter(dict(reversed(state.items())), made.peft_config["one"], "IA3")
    assert again.digest == loaded.digest
    assert (
        PeftAdapter({**state, next(iter(state)): torch.zeros(1)}, made.peft_config["one"], "").key
        != again.key
    )


def test_weights_that_peft_changes_are_copied() -> None:
    """PiSSA takes its beginning off the layers that it is for, and off no layer of the model."""
    config = lora(init_lora_weights="pissa", r=2, target_modules=["q_proj"])
    made = peft.get_peft_model(tiny_llama(), config, "one").eval()
    with torch.no_grad():
        for name, each in made.named_parameters():
            each.mul_(2.0 if "lora_B" in name else 1.0)
    model = tiny_llama()
    before = [each.clone() for each in model.parameters()], logits(model)
    state = peft.get_peft_model_state_dict(made, adapter_name="one")
    loaded = PeftAdapter(state, made.peft_config["one"], "PiSSA")
    twin = loaded.twin(model, "x")
    assert torch.allclose(logits(twin), logits(made), atol=1e-5)
    assert not torch.equal(logits(twin), before[1])
    assert all(map(torch.equal, model.parameters(), before[0]))
    assert torch.equal(logits(model), before[1])
    layers = model.model.layers
    weights = sum(layer.self_attn.q_proj.weight.nbytes for layer in layers)
    assert loaded.bytes == weights + sum(each.nbytes for each in state.values())
    assert twin.model.embed_tokens.weight is model.model.embed_tokens.weight


def test_an_adapter_for_another_model_is_refused() -> None:
    made = other_method("IA3", 1)
    state = peft.get_peft_model_state_dict(made, adapter_name="one")
    config = made.peft_config["one"]
    model = tiny_llama()
    for given, why in (
        ({name: torch.ones(3, 5) for name in state}, "peft cannot load"),
        (
            {**state, "base_model.model.model.layers.9.self_attn.k_proj.ia3_l": torch.ones(16, 1)},
            "no place for",
        ),
        (dict(list(state.items())[1:]), "further weights"),
    ):
        with pytest.raises(ValueError, match=why):
            PeftAdapter(given, config, "IA3").twin(model, "x")
