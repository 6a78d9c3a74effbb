"""A lookout says "unchanged" of nothing that would be another state, and of a model that nobody touched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import BY_NAME, FAMILIES, build
from model_changes import CHANGES, layer
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_paged.model.lookout import Lookout
from hf_paged.model.state import ModelState


def lookout(model: Any) -> Lookout:
    return Lookout(model, model.forward)


def _closure(model: Any, patch: pytest.MonkeyPatch) -> None:
    type(layer(model).mlp).factor_of.__closure__[0].cell_contents = 4  # type: ignore[attr-defined]


def _shadow(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[type(layer(model).self_attn).__module__], "getattr", getattr, raising=False)


def _attributes_changed_places(model: Any, patch: pytest.MonkeyPatch) -> None:
    del layer(model).mlp.helper
    layer(model).mlp.other = 1


def _key_became_another(model: Any, patch: pytest.MonkeyPatch) -> None:
    named = layer(model).mlp.named
    named["two"] = named.pop("one")


def _buffer_became_none(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.rotary_emb.inv_freq = None


SHARPER: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "a tensor that is equal": lambda model, patch: setattr(layer(model).mlp, "scale", torch.tensor(2.0)),
    "a tensor moved": lambda model, patch: setattr(layer(model).mlp.shift, "data", torch.tensor(2.0)),
    "in a list": lambda model, patch: layer(model).mlp.several.append(3),
    "in a dict": lambda model, patch: layer(model).mlp.named.update(one=2),
    "a key for another": _key_became_another,
    "another in a list": lambda model, patch: layer(model).mlp.several.__setitem__(0, 2),
    "in a list in a dict": lambda model, patch: layer(model).mlp.nested["list"].append(3),
    "another in a list in a dict": lambda model, patch: layer(model).mlp.nested["list"].__setitem__(0, 2),
    "a tensor in a dict moved": lambda model, patch: setattr(
        layer(model).mlp.nested["tensor"], "data", torch.tensor(2.0)
    ),
    "another class": lambda model, patch: setattr(
        layer(model).mlp, "__class__", type("Other", (type(layer(model).mlp),), {})
    ),
    "what a function encloses": _closure,
    "a name that was torch's": _shadow,
    "one attribute for another": _attributes_changed_places,
    "buffer gone": _buffer_became_none,
    "all attributes": lambda model, patch: setattr(
        layer(model).mlp, "__dict__", {**vars(layer(model).mlp), "scale": 3.0}
    ),
    "module gone": lambda model, patch: model.model.layers.pop(-1),
}


def prepared(model: Any, patch: pytest.MonkeyPatch) -> Any:
    """A model with something of every kind on it."""
    factor = 3

    def factor_of(self: Any) -> Any:
        return factor, getattr(self, "scale", None)

    mlp = layer(model).mlp
    patch.setattr(type(mlp), "factor_of", factor_of, raising=False)
    mlp.helper, mlp.scale, mlp.shift, mlp.several, mlp.named = (
        SimpleNamespace(factor=2),
        2.0,
        torch.tensor(1.0),
        [1],
        {"one": 1},
    )
    mlp.nested = {"list": [1, 2], "tensor": torch.tensor(1.0)}
    return model


@pytest.mark.parametrize("change", [*CHANGES, *SHARPER])
def test_a_change_is_noticed(change: str, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(llama, monkeypatch)
    kept = lookout(model)
    assert kept.unchanged(model.forward)
    (CHANGES | SHARPER)[change](model, monkeypatch)
    assert not kept.unchanged(model.forward)
    assert lookout(model).unchanged(model.forward)


def test_what_changes_no_state_may_be_noticed_and_is_read_as_the_same(llama: Any) -> None:
    kept = lookout(llama)
    with torch.no_grad():
        llama.lm_head.weight += 1
    llama.generation_config.max_length = 99
    assert kept.unchanged(llama.forward)
    llama.config.rms_norm_eps = float(f"{llama.config.rms_norm_eps}")  # an equal number, another object
    assert kept.state == lookout(llama).state


def test_hooks_that_take_each_others_place(llama: Any) -> None:
    first = layer(llama).mlp.register_forward_hook(lambda *_: None)
    kept = lookout(llama)
    first.remove()
    layer(llama).mlp.register_forward_hook(lambda *_: None)
    assert not kept.unchanged(llama.forward)


@pytest.mark.parametrize("hook", ["_global_forward_hooks", "_global_forward_pre_hooks"])
def test_hooks_of_everybody(hook: str, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = lookout(llama)
    monkeypatch.setattr(nn.modules.module, hook, {1: print})
    assert not kept.unchanged(llama.forward)


def test_adapters(llama: Any) -> None:
    model: Any = get_peft_model(
        llama, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    base = model.get_base_model()
    for change in (
        lambda: model.set_adapter("other"),
        lambda: base.model.layers[0].self_attn.q_proj.scale_layer(2.0),
        model.base_model.disable_adapter_layers,
        model.base_model.enable_adapter_layers,
        model.merge_adapter,
    ):
        kept = lookout(base)
        change()
        assert not kept.unchanged(base.forward)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_a_forward_changes_nothing(name: str) -> None:
    model = build(BY_NAME[name])
    inputs = {"input_ids": torch.randint(5, 90, (2, 7)), "max_new_tokens": 3, "do_sample": False}
    model.generate(**inputs)
    kept = lookout(model)
    model.generate(**inputs)
    assert kept.unchanged(model.forward) or kept.state == ModelState(model, model.forward)


def test_the_state_is_the_same_object_as_long_as_nothing_happens(llama: Any) -> None:
    kept = lookout(llama)
    assert kept.state == ModelState(llama, llama.forward)
    assert kept.unchanged(llama.forward)
    llama.config.rms_norm_eps = 0.5
    assert kept.state != ModelState(llama, llama.forward)
