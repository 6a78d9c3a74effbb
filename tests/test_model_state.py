"""What a captured step takes for granted: whatever changes an answer changes the state, weights in place do
not.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import BY_NAME, FAMILIES, build
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LogitsProcessorList, MinLengthLogitsProcessor, TextStreamer

from hf_paged.model.state import ModelState, Same, runs_foreign_code


class Thing:
    """Any object."""

    model: Any


def state(model: Any) -> ModelState:
    return ModelState(model, model.forward)


def layer(model: Any) -> Any:
    return model.model.layers[0]


def _parameter_replaced(model: Any, patch: pytest.MonkeyPatch) -> None:
    layer(model).mlp.up_proj.weight = nn.Parameter(layer(model).mlp.up_proj.weight.detach().clone())


def _function_of_the_file(model: Any, patch: pytest.MonkeyPatch) -> None:
    place = sys.modules[type(layer(model).self_attn).__module__]
    stock = place.apply_rotary_pos_emb
    patch.setattr(place, "apply_rotary_pos_emb", lambda *args, **kwargs: stock(*args, **kwargs))


def _class_patched(model: Any, patch: pytest.MonkeyPatch) -> None:
    kind = type(layer(model).mlp)
    stock = kind.forward
    patch.setattr(kind, "forward", lambda self, x: stock(self, x) * 2)


def _forward_of_the_model(model: Any, patch: pytest.MonkeyPatch) -> None:
    stock = model.forward
    model.forward = lambda *args, **kwargs: stock(*args, **kwargs)


def _tf32(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("hf_paged.model.state._products", lambda: "another")


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "config": lambda model, patch: setattr(model.config, "rms_norm_eps", 0.5),
    "nested setting": lambda model, patch: model.config.rope_parameters.update(rope_theta=7.0),
    "number of a module": lambda model, patch: setattr(layer(model).self_attn, "scaling", 0.25),
    "parameter replaced": _parameter_replaced,
    "parameter moved": lambda model, patch: setattr(
        model.lm_head.weight, "data", model.lm_head.weight.data.clone()
    ),
    "buffer replaced": lambda model, patch: model.model.rotary_emb.register_buffer(
        "inv_freq", torch.ones(4), persistent=False
    ),
    "module replaced": lambda model, patch: setattr(layer(model).mlp, "act_fn", nn.ReLU()),
    "forward of a module": lambda model, patch: setattr(layer(model).mlp, "forward", lambda x: x),
    "forward of the model": _forward_of_the_model,
    "class": _class_patched,
    "class setting": lambda model, patch: patch.setattr(type(layer(model).mlp), "factor", 3, raising=False),
    "function of the file": _function_of_the_file,
    "object's number": lambda model, patch: setattr(layer(model).mlp.helper, "factor", 3),
    "hook": lambda model, patch: layer(model).mlp.register_forward_hook(lambda *_: None),
    "mode": lambda model, patch: layer(model).train(),
    "products": _tf32,
}


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
