"""What a captured step takes for granted: whatever changes an answer changes the state, weights in place do
not.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import BY_NAME, FAMILIES, build
from model_changes import CHANGES, layer
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LogitsProcessorList, MinLengthLogitsProcessor, TextStreamer

from hf_paged.model.state import ModelState, Same, runs_foreign_code


class Thing:
    """Any object."""

    model: Any


def state(model: Any) -> ModelState:
    return ModelState(model, model.forward)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_another_state(change: str, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer(llama).mlp.helper = SimpleNamespace(factor=2)
    before = state(llama)
    assert state(llama) == before
    assert hash(state(llama)) == hash(before)
    CHANGES[change](llama, monkeypatch)
    assert state(llama) != before


def test_weights_in_place_and_generation_settings_are_no_change(llama: Any) -> None:
    before = state(llama)
    with torch.no_grad():
        llama.lm_head.weight += 1
    llama.generation_config.max_length = 99
    assert state(llama) == before


def test_the_users_attention_is_part_of_the_state_while_ours_stands_in(llama: Any) -> None:
    from hf_paged.model.switch import restore, switch

    states = []
    for setting in ("sdpa", "eager"):
        llama.set_attn_implementation(setting)
        switch([llama.config], "hf_paged", states)
        states.append(state(llama))
        restore([llama.config], states)
    assert states[0] != states[1]


def test_adapters_are_part_of_the_state(llama: Any) -> None:
    model: Any = get_peft_model(
        llama, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    base = model.get_base_model()
    seen = [state(base)]
    for change in (
        lambda: model.set_adapter("other"),
        lambda: base.model.layers[0].self_attn.q_proj.scale_layer(2.0),
        model.base_model.disable_adapter_layers,
        model.base_model.enable_adapter_layers,
        model.merge_adapter,
    ):
        change()
        assert state(base) != seen[-1]
        seen.append(state(base))


@pytest.mark.parametrize("hook", ["_global_forward_hooks", "_global_forward_pre_hooks"])
def test_hooks_are_not_steady(hook: str, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state(llama).steady
    monkeypatch.setattr(nn.modules.module, hook, {1: print})
    assert not state(llama).steady
    monkeypatch.undo()
    assert not state(llama.train()).steady


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_calls_leave_the_state_as_it_was(name: str) -> None:
    family = BY_NAME[name]
    model = build(family)
    inputs = {"input_ids": torch.randint(5, 90, (2, 7)), "max_new_tokens": 3, "do_sample": False}
    model.generate(**inputs)
    before = state(model)
    model.generate(**inputs, cache_implementation="paged")
    assert state(model) == before


def test_a_state_keeps_no_model() -> None:
    model = build(BY_NAME["llama"])
    model.model.layers[0].mlp.also = model.forward  # a bound method of the model, as wrappers keep it
    model.model.layers[0].mlp.helper = Thing()
    model.model.layers[0].mlp.helper.model = model
    kept, gone = state(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert kept != state(build(BY_NAME["llama"]))


def test_the_dead_are_equal_to_nobody() -> None:
    thing = Thing()
    one, other = Same(thing), Same(thing)
    assert one == other
    assert hash(one) == hash(other)
    assert one != Same(Thing())
    del thing
    gc.collect()
    assert one != other
    assert Same([1]) != Same([1])


def test_whose_code_runs_between_the_steps() -> None:
    class Mine(MinLengthLogitsProcessor):
        pass

    stock = MinLengthLogitsProcessor(3, 2, device="cpu")
    assert not runs_foreign_code({})
    assert not runs_foreign_code(
        {"logits_processor": LogitsProcessorList([stock]), "streamer": TextStreamer(None)}
    )
    assert runs_foreign_code({"logits_processor": [stock, Mine(3, 2, device="cpu")]})
    assert runs_foreign_code({"stopping_criteria": [lambda ids, scores: False]})
    assert runs_foreign_code({"prefix_allowed_tokens_fn": lambda row, ids: [3]})
    assert runs_foreign_code({"streamer": object()})
    assert runs_foreign_code({"custom_generate": print})
