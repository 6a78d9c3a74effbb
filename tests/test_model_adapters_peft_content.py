"""An adapter of any kind by its parts: a change of it is seen, and one of another is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_answers import NEW, ask, first, prompt
from adapters import adapted, lora
from other_methods import other_method, tiny_llama

from hf_paged import Engine
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


def test_a_router_over_adapters_has_their_weights(tmp_path: Path) -> None:
    """Arrow: no block that it computed with others is found, in a peft model whose experts are trained."""
    adapted(lora(), lora()).save_pretrained(tmp_path)
    paths = [str(tmp_path / name) for name in ("one", "two")]
    config = peft.ArrowConfig(top_k=1, router_temperature=1.0, rng_seed=1)
    model = peft.tuners.lora.create_arrow_model(tiny_llama(), paths, config).eval()
    ids = prompt(1)
    with Engine(model, block_size=4, num_blocks=100) as engine:
        before = ask(engine, ids, adapter="arrow_router")
        plain = ask(engine, ids, adapter=None)
        with torch.no_grad():
            for name, each in model.named_parameters():
                if "lora_B.task_1" in name:
                    each.mul_(-3.0)
        found = engine.generate([ids, ids], max_new_tokens=NEW, do_sample=False, adapter="arrow_router")
        assert found[0].cached_tokens == 0
        assert ask(engine, ids, adapter=None) == plain
    out = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    assert first(found[0]) == first(found[1]) == list(out[0, len(ids) :].tolist()) != before
