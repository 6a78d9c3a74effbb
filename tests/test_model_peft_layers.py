"""The LoRA layers that peft has put into a model: adapters apart from it, each with an identity of its own."""

from __future__ import annotations

from typing import Any

import pytest
from adapter_tables import snapshot
from adapters import adapted, lora

from hf_paged.model.adapters.identity import AdapterStates
from hf_paged.model.identity import identity_of
from hf_paged.model.snapshot import ModelSnapshot


def test_switching_adding_and_disabling_leave_the_model_as_it_is() -> None:
    """Base requests keep their blocks and captured steps, whatever happens to adapters."""
    model = adapted(lora(), lora(r=4))
    first = snapshot(model)
    model.set_adapter("two")
    assert first.unchanged()
    model.add_adapter("new", lora(target_modules=["q_proj"]))
    model.eval()
    assert first.unchanged()
    model.delete_adapter("one")
    with model.disable_adapter():
        assert snapshot(model).graph_key is first.graph_key
        assert snapshot(model).lora.active == ()
    assert snapshot(model).lora.names == ["two", "new"]


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head", "norm"]},
        {"target_modules": ["embed_tokens"]},
        {"trainable_token_indices": [5, 7]},
    ],
    ids=["dora", "bias", "modules_to_save", "embedding", "tokens"],
)
def test_parts_of_every_kind_leave_the_model_as_it_is(options: dict[str, Any]) -> None:
    """Peft's modules around embeddings and heads are none of the model's, as its LoRA layers are."""
    model = adapted(lora(), lora())
    first = snapshot(model)
    model.add_adapter("new", lora(**options))
    model.eval()
    found = snapshot(model)
    assert found.lora.apart
    assert found.same_modules(first)
    model.set_adapter("new")
    with_new = snapshot(model)
    assert with_new.lora.active == ("new",)
    model.set_adapter("two")
    assert with_new.graph_key is snapshot(model).graph_key
    assert with_new.unchanged()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: model.merge_adapter(), "merged"),
        (lambda model: model.add_adapter("d", lora(init_lora_weights="mica")), "MiCA"),
        (lambda model: model.add_adapter("d", lora(modules_to_save=["mlp"])), "no linear layer, embedding"),
    ],
    ids=["merged", "mica", "a block"],
)
def test_what_only_peft_computes_belongs_to_the_model(change: Any, why: str) -> None:
    """Such adapters are part of the model's state, as peft's own code computes them."""
    model = adapted(lora(), lora())
    first = snapshot(model)
    change(model)
    found = snapshot(model)
    assert not first.unchanged()
    assert found.graph_key is not first.graph_key
    assert not found.lora.apart
    assert why in str(found.lora.why_not)


def test_a_change_of_one_adapter_is_its_own() -> None:
    """Training in place, a scale, a re-added name: another number for that adapter, and for no other (C24)."""
    model = adapted(lora(), lora())
    base = model.get_base_model()

    def keys() -> list[Any]:
        states = AdapterStates.of(identity_of(base), ModelSnapshot(base).lora, ["one", "two"])
        return [identity_of(base).prefix_key(ModelSnapshot(base)), states.key(["one"]), states.key(["two"])]

    layer = base.model.layers[0].self_attn.v_proj
    before = keys()
    assert keys() == before
    for change in (
        lambda: layer.lora_B["one"].weight.data.add_(1e-3),
        lambda: layer.set_scale("one", 3.0),
        lambda: (model.delete_adapter("one"), model.add_adapter("one", lora()), model.eval()),
    ):
        change()
        after = keys()
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
        before = after


def test_the_verdict_is_one_by_name() -> None:
    """One adapter of another kind leaves the verdict on those beside it as it was."""
    model = adapted(lora(), lora(init_lora_weights="mica"), lora(modules_to_save=["mlp"]), lora(r=3))
    reasons = snapshot(model).lora.reasons
    assert list(reasons) == ["one", "two", "three", "four"]
    assert {name: why is None for name, why in reasons.items()} == {
        "one": True,
        "two": False,
        "three": False,
        "four": True,
    }
    assert "MiCA" in str(reasons["two"])
    assert "LlamaMLP in modules_to_save" in str(reasons["three"])
    model.delete_adapter("two")
    model.delete_adapter("three")
    assert not any(snapshot(model).lora.reasons.values())
