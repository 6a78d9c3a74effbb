"""Which models ranks may divide; the ranks themselves are in test_engine_parallel.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import tiny
import transformers as tf
from families import BY_NAME, build
from transformers import AutoModelForCausalLM, HrmTextConfig

from hf_paged import demo
from hf_paged.engine.weights import load_into
from hf_paged.model.adapters.state_dict import parts_in
from hf_paged.model.peft_layers import why_no_adapters_on_ranks
from hf_paged.model.ranks import tensor_parallel
from hf_paged.model.shards import require_known_parts


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_that_loading_cuts_after_ranks_have_their_part(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C41: transformers' ranks of HRM-Text have parts of the wrong projections; Llama's are right."""
    monkeypatch.setattr(tensor_parallel, "mesh_of", lambda model: SimpleNamespace(size=lambda: ranks))
    config = HrmTextConfig(
        vocab_size=96, hidden_size=48, intermediate_size=48, num_hidden_layers=2, num_attention_heads=6
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    reason = tensor_parallel.why_not_divided(model)
    assert reason is not None
    assert "gate_up_proj" in reason
    llama: Any = build(BY_NAME["llama"])
    assert "gate_up_proj" not in (tensor_parallel.why_not_divided(llama) or "")
    ocr = tiny.build("image", tiny.config_class("image", "qianfan_ocr"))  # a tower's, which is whole on each
    assert tensor_parallel.why_not_divided(ocr) is None or ranks == 3
    heads = llama.config.num_attention_heads
    assert (tensor_parallel.why_not_divided(llama) is None) == (heads % ranks == 0)


@pytest.mark.parametrize(("kind", "wrong"), [("step3p7", True), ("minimax_m3_vl", False)])
def test_weights_that_loading_joins_after_ranks_have_their_part(
    kind: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C41: of Step3.7 the stacked weights of experts; those of MiniMax M3 are stacked expert by expert."""
    monkeypatch.setattr(tensor_parallel, "mesh_of", lambda model: SimpleNamespace(size=lambda: 2))
    if kind not in [each.model_type for each in tiny.mappings()["image"]]:
        pytest.skip(f"this release of transformers has no {kind}")
    reason = tensor_parallel.why_not_divided(tiny.build("image", tiny.config_class("image", kind)))
    assert ("as if each were both" in (reason or "")) == wrong, reason


def test_parts_that_do_not_say_which_they_are() -> None:
    """As those of transformers 5.9, whose ranks have plain tensors: nothing is made to fit by its shape."""
    model: Any = demo.model()
    require_known_parts(model)
    model._device_mesh, model._tp_size = SimpleNamespace(ndim=1), 2
    wrapped: Any = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert "does not say which part" in str(why_no_adapters_on_ranks(wrapped.base_model.model))
    wrapped.unload()
    assert why_no_adapters_on_ranks(model) is None
    for load in (lambda: load_into(model, model.state_dict()), lambda: parts_in(model, {}, None, "poet")):
        with pytest.raises(ValueError, match=f"transformers {tf.__version__} does not say which part"):
            load()
