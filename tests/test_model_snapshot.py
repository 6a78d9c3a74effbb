"""A model is the same or not: all that changes an answer changes the graph key, weights in place do not, and
the quick check misses nothing that changes the key.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dropout import train_with_dropout
from families import BY_NAME, FAMILIES, build
from model_changes import CHANGES, layer
from model_checks import checker, graph_key, is_steady, prefix_key
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LogitsProcessorList, MinLengthLogitsProcessor, TextStreamer

from hf_paged.model.snapshot import runs_foreign_code
from hf_paged.model.switch import restore, switch


class Thing:
    """Any object."""

    model: Any


# ---- the graph key


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_the_key(change: str, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer(llama).mlp.helper = SimpleNamespace(factor=2)
    before = graph_key(llama)
    assert graph_key(llama) == before
    assert graph_key(llama).same(before)
    CHANGES[change](llama, monkeypatch)
    assert graph_key(llama) != before


def test_a_forward_on_another_module_changes_the_key(llama: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x

    mlp = layer(llama).mlp
    keys = []
    for module in (mlp.gate_proj, mlp.up_proj):
        module.forward = forward
        keys.append((graph_key(llama), prefix_key(llama)))
        del module.forward
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] != keys[1][1]


def test_weights_in_place_and_generation_settings_are_no_change(llama: Any) -> None:
    before = graph_key(llama)
    with torch.no_grad():
        llama.lm_head.weight += 1
    llama.generation_config.max_length = 99
    assert graph_key(llama) == before


def test_the_key_holds_the_users_attention_while_ours_replaces_it(llama: Any) -> None:
    keys = []
    for setting in ("sdpa", "eager"):
        llama.set_attn_implementation(setting)
        switch([llama.config], "hf_paged", keys)
        keys.append(graph_key(llama))
        restore([llama.config], keys)
    assert keys[0] != keys[1]


def _tuned(model: Any) -> Any:
    """The model under peft's wrapper, with two adapters."""
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    tuned: Any = get_peft_model(model, config).eval()
    tuned.add_adapter("other", config)
    return tuned


def test_merged_adapters_change_the_key_and_are_noticed(llama: Any) -> None:
    """Others are apart from the model: test_model_peft_layers.py."""
    tuned = _tuned(llama)
    base = tuned.get_base_model()
    before, unchanged = graph_key(base), checker(base)
    tuned.merge_adapter()
    assert graph_key(base) != before
    assert not unchanged()


@pytest.mark.parametrize("hook", ["_global_forward_hooks", "_global_forward_pre_hooks"])
def test_global_hooks_and_training_are_not_steady(
    hook: str, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchanged = checker(llama)
    assert is_steady(llama)
    monkeypatch.setattr(nn.modules.module, hook, {1: print})
    assert not is_steady(llama)
    assert not unchanged()
    monkeypatch.undo()
    assert is_steady(llama.train())
    assert not is_steady(train_with_dropout(llama))


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_calls_leave_the_model_as_it_was(name: str) -> None:
    model = build(BY_NAME[name])
    inputs = {"input_ids": torch.randint(5, 90, (2, 7)), "max_new_tokens": 3, "do_sample": False}
    model.generate(**inputs)
    before, unchanged = graph_key(model), checker(model)
    model.generate(**inputs)
    assert unchanged() or graph_key(model) == before
    model.generate(**inputs, cache_implementation="paged")
    assert graph_key(model) == before


def test_a_paged_call_that_runs_leaves_the_key(llama: Any) -> None:
    """Its forward and its attention are ours, not the user's."""
    before = graph_key(llama)
    keys = []

    def note(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        keys.append(graph_key(llama))
        return torch.zeros(len(ids), dtype=torch.bool)

    ids = torch.randint(5, 90, (2, 7))
    call = {"max_new_tokens": 3, "do_sample": False, "stopping_criteria": [note]}
    llama.generate(ids, **call, cache_implementation="paged")
    assert keys == [before] * 3
    stock = llama.forward
    llama.forward = functools.wraps(stock)(lambda *args, **kwargs: stock(*args, **kwargs))
    llama.generate(ids, **call, cache_implementation="paged")
    assert keys[3:] == [graph_key(llama)] * 3
    assert graph_key(llama) != before


def test_a_key_keeps_no_model_alive() -> None:
    model = build(BY_NAME["llama"])
    model.model.layers[0].mlp.also = model.forward  # a bound method of the model, as wrappers keep it
    model.model.layers[0].mlp.helper = Thing()
    model.model.layers[0].mlp.helper.model = model
    kept, gone = graph_key(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert kept != graph_key(build(BY_NAME["llama"]))


def test_an_object_that_is_gone_equals_no_other(llama: Any) -> None:
    """Another object may lie where it was."""
    for made in (Thing, list):
        mlp = layer(llama).mlp
        mlp.helper = [[[[made()]]]] if made is list else made()
        before = graph_key(llama)
        assert graph_key(llama) == before
        for _ in range(3):
            mlp.helper = None
            gc.collect()
            mlp.helper = [[[[made()]]]] if made is list else made()
            assert graph_key(llama) != before


# ---- the quick check


def _closure(model: Any, patch: pytest.MonkeyPatch) -> None:
    type(layer(model).mlp).factor_of.__closure__[0].cell_contents = 4  # type: ignore[attr-defined]


def _shadow(model: Any, patch: pytest.MonkeyPatch) -> None:
    """The forward of the model names it in every release."""
    patch.setattr(sys.modules[type(model.model).__module__], "ValueError", ValueError, raising=False)


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
    mlp.helper = SimpleNamespace(factor=2)
    mlp.scale = 2.0
    mlp.shift = torch.tensor(1.0)
    mlp.several = [1]
    mlp.named = {"one": 1}
    mlp.nested = {"list": [1, 2], "tensor": torch.tensor(1.0)}
    return model


@pytest.mark.parametrize("change", [*CHANGES, *SHARPER])
def test_a_change_is_noticed(change: str, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(llama, monkeypatch)
    unchanged = checker(model)
    assert unchanged()
    (CHANGES | SHARPER)[change](model, monkeypatch)
    assert not unchanged()
    assert checker(model)()


def test_an_equal_setting_may_be_noticed_and_leaves_the_key(llama: Any) -> None:
    key, unchanged = graph_key(llama), checker(llama)
    with torch.no_grad():
        llama.lm_head.weight += 1
    llama.generation_config.max_length = 99
    assert unchanged()
    llama.config.rms_norm_eps = float(f"{llama.config.rms_norm_eps}")  # an equal number, another object
    assert key == graph_key(llama)


def test_hooks_that_replace_each_other(llama: Any) -> None:
    first = layer(llama).mlp.register_forward_hook(lambda *_: None)
    unchanged = checker(llama)
    first.remove()
    layer(llama).mlp.register_forward_hook(lambda *_: None)
    assert not unchanged()


# ---- when to check


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
