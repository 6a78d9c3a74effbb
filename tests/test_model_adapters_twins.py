"""Twins of a model: the same tensors, flags of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters import adapted, lora
from other_methods import other_method, tiny_llama

from hf_paged.model.adapters.twins import NoTwin, activate, twin_of, without_tuners

IDS = torch.arange(5, 14)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("kind", ["IA3", "dora"])
def test_a_twin_computes_what_its_model_would(kind: str) -> None:
    """With either adapter, with none, and without peft's modules; the model's flags stay as they are."""
    model = adapted(lora(use_dora=True), lora(use_dora=True)) if kind == "dora" else other_method(kind)
    base = model.get_base_model()
    twin = twin_of(base)
    assert [*map(id, twin.parameters())] == [*map(id, base.parameters())]
    assert set(map(id, twin.modules())).isdisjoint(map(id, base.modules()))
    for name in ("one", "two"):
        activate(twin, [name])
        model.set_adapter("one")
        wanted = [each.requires_grad for each in base.parameters()]
        found = logits(twin)
        assert [each.requires_grad for each in base.parameters()] == wanted
        assert model.active_adapters == ["one"]
        model.set_adapter(name)
        assert torch.equal(found, logits(base))
    with model.disable_adapter():
        expected = logits(base)
    activate(twin, [])
    assert torch.equal(logits(twin), expected)
    assert torch.equal(logits(without_tuners(twin)), expected)
    assert not torch.equal(logits(base), expected)


def test_a_write_to_the_model_is_one_to_its_twin() -> None:
    base = tiny_llama()
    twin = twin_of(base)
    with torch.no_grad():
        base.lm_head.weight.mul_(2.0)
    assert torch.equal(logits(twin), logits(base))


def test_a_forward_that_a_copy_would_share_is_refused() -> None:
    base = tiny_llama()
    stock = base.model.forward
    base.model.forward = lambda *args, **kwargs: stock(*args, **kwargs)
    with pytest.raises(NoTwin, match="the forward of LlamaModel was replaced by a function"):
        twin_of(base)
