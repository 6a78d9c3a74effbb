"""An adapter of any kind by its parts: a change of it is seen, and one of another is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters import adapted, lora
from other_methods import other_method

from hf_paged.model.adapters.peft_content import PeftContent
from hf_paged.model.identity import identity_of
from hf_paged.model.peft_layers import LoraLayers


def numbers(model: Any) -> list[int]:
    """The number of each adapter's content."""
    base = model.get_base_model()
    lora = LoraLayers.of(base)
    return [identity_of(base).of_adapter(name).prefix_key(PeftContent(lora, name)) for name in ("one", "two")]


@pytest.mark.parametrize("kind", ["IA3", "LOHA", "VERA", "TRAINABLE_TOKENS", "dora", "saved"])
def test_a_change_of_one_is_its_own(kind: str) -> None:
    options: dict[str, Any] = {"dora": {"use_dora": True}, "saved": {"modules_to_save": ["lm_head"]}}
    model = adapted(lora(**options[kind]), lora(**options[kind])) if kind in options else other_method(kind)
    before = numbers(model)
    assert numbers(model) == before
    parts = PeftContent(LoraLayers.of(model.get_base_model()), "one")
    assert parts.bytes == sum(each.nbytes for each in parts.tensors) > 0
    with torch.no_grad():
        parts.tensors[0].data.add_(0.25)
    after = numbers(model)
    assert after[0] != before[0]
    assert after[1] == before[1]
    model.set_adapter("two")
    with model.disable_adapter():
        assert numbers(model) == after


def test_settings_count() -> None:
    """A scale that is set, and a name that is added again."""
    model = adapted(lora(use_dora=True), lora(use_dora=True))
    before = numbers(model)
    model.get_base_model().model.layers[0].self_attn.v_proj.set_scale("one", 3.0)
    scaled = numbers(model)
    assert scaled[0] != before[0]
    model.delete_adapter("one")
    model.add_adapter("one", lora(use_dora=True))
    again = numbers(model)
    assert again[0] not in (before[0], scaled[0])
    assert scaled[1] == again[1] == before[1]
    assert PeftContent(LoraLayers.of(model.get_base_model()), "one").rank == 8
