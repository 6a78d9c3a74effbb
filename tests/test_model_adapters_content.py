"""Adapters of a peft model by name: which there are, and whether they have changed since they were read (C24)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters import adapted, lora
from families import BY_NAME, build

from hf_paged.model.adapters.content import AdapterContents
from hf_paged.model.adapters.loading import HostAdapter, load_adapter
from hf_paged.model.adapters.virtual import VirtualPrompts
from hf_paged.model.lora import Adapter


@pytest.fixture
def model() -> Any:
    return adapted(lora(), lora(r=3))


@pytest.fixture
def contents(model: Any) -> AdapterContents:
    found = AdapterContents(model.get_base_model(), VirtualPrompts(None, model, lambda rows: ()))
    assert not found.differ()  # all are read
    return found


def weight(model: Any, name: str) -> torch.nn.Parameter:
    return next(each for path, each in model.named_parameters() if f"lora_B.{name}." in path)


def test_names_follow_the_model(model: Any, contents: AdapterContents) -> None:
    assert (contents.names, contents.has("one"), contents.has("three")) == (["one", "two"], True, False)
    assert not contents.refresh()
    model.add_adapter("three", lora(r=2))
    contents.look_if_moved()
    assert contents.has("three")
    assert contents.refresh()
    assert contents.changed(["one", "two"]) == {"one", "two"}  # until they are read again
    assert not contents.differ()
    model.delete_adapter("one")
    contents.look_if_moved()
    assert contents.names == ["two", "three"]
    assert contents.changed(["one", "two"]) == {"one"}


def test_a_write_changes_its_adapter_alone(model: Any, contents: AdapterContents) -> None:
    with torch.no_grad():
        weight(model, "two").mul_(2)
    assert contents.changed(["one", "two"]) == {"two"}
    assert contents.rewritten(["two"])
    assert not contents.rewritten(["one"])
    assert contents.differ()
    assert contents.changed(["one", "two"]) == set()
    assert not contents.differ()


def test_a_write_that_torch_does_not_count(model: Any, contents: AdapterContents) -> None:
    weight(model, "one").data.view(-1)[0] += 1.0
    assert contents.changed(["one"]) == set()
    assert contents.rewritten(["one"])


def test_a_step_of_an_optimizer_is_a_write_to_what_has_gradients(
    model: Any, contents: AdapterContents
) -> None:
    one, two = weight(model, "one"), weight(model, "two")
    one.grad = torch.ones_like(one)
    contents.note_step(torch.optim.SGD([one, two], lr=0.1))
    assert contents.changed(["one", "two"]) == {"one"}
    assert not contents.differ()  # nothing was written after all
    assert contents.changed(["one", "two"]) == set()


def test_steps_look_at_no_tensor_of_an_adapter_of_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = build(BY_NAME["llama"])
    source = adapted(lora(use_dora=True))
    found = AdapterContents(plain, VirtualPrompts(None, plain, lambda rows: ()))
    found.own["one"] = HostAdapter(plain, load_adapter(plain, source, None, "one"), False)
    key = found.key(["one"])
    with monkeypatch.context() as patch:
        patch.setattr(Adapter, "versions", property(lambda self: pytest.fail("the adapter is read")))
        assert found.changed(["one"]) == set()
    with torch.no_grad():
        plain.model.layers[0].self_attn.q_proj.weight.mul_(2)
    found.note_weights()
    assert found.changed(["one"]) == {"one"}
    assert found.key(["one"]) != key
    assert found.changed(["one"]) == set()
    found.refresh()
    assert found.changed(["one"]) == {"one"}


def test_every_look_sees_what_has_changed_since_the_last(model: Any, contents: AdapterContents) -> None:
    layer = next(each for each in model.modules() if hasattr(each, "lora_A"))
    parts = layer.lora_A

    def add_to_a_layer() -> None:
        layer.lora_magnitude_vector["two"] = torch.nn.Linear(1, 1)

    changes = (
        lambda: setattr(parts["two"], "weight", torch.nn.Parameter(parts["two"].weight.data.clone())),
        lambda: setattr(parts["two"].weight, "data", parts["two"].weight.data[:2]),
        lambda: parts.__setitem__("two", torch.nn.Linear(*reversed(parts["two"].weight.shape), bias=False)),
        lambda: layer.set_scale("two", 1.5),
        lambda: setattr(layer, "scaling", {**layer.scaling, "two": 3.0}),
        lambda: setattr(layer, "lora_A", torch.nn.ModuleDict({**parts, "two": torch.nn.Linear(4, 4)})),
        lambda: model.to(torch.float64),
        add_to_a_layer,
    )
    for change in changes:
        for _ in range(2):  # read, and then as it was seen
            assert contents.changed(["one", "two"]) == set()
        change()
        found = contents.changed(["one", "two"])
        assert "two" in found
        assert found == {"two"} or parts["one"].weight.dtype == torch.float64
        assert contents.changed(["one", "two"]) == found
        assert contents.differ()
