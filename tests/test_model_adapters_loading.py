"""Adapters as they are read: equal weights elsewhere are another one, half precision computes as in peft."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from adapter_answers import NEW, alone, ask, first, prompt
from adapters import adapted, lora
from families import BY_NAME, build

from hf_paged import Engine

GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture
def model() -> Any:
    return adapted(lora(), lora(r=3, use_rslora=True), lora(r=24, target_modules=["q_proj", "down_proj"]))


def plain() -> Any:
    torch.manual_seed(0)
    return build(BY_NAME["llama"]).eval()


def test_equal_weights_in_other_layers_are_another_adapter() -> None:
    """No block of the one is found by the other."""
    a, b = torch.randn(8, 32), torch.randn(32, 8)
    path = "base_model.model.model.layers.0.self_attn"
    with Engine(plain(), block_size=4) as engine:
        for name in ("q_proj", "o_proj"):
            state = {f"{path}.{name}.lora_A.weight": a, f"{path}.{name}.lora_B.weight": b}
            engine.add_adapter(name, state, lora(target_modules=[name]))
            output = engine.generate([prompt(2, 21)], **GREEDY, adapter=name)[0]
            assert output.cached_tokens == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_computed_as_peft_does(model: Any, dtype: torch.dtype) -> None:
    """On a float32 model peft widens them when it loads them."""
    state = {
        key: value.to(dtype)
        for key, value in peft.get_peft_model_state_dict(model, adapter_name="one").items()
    }
    wrapped = peft.get_peft_model(plain(), model.peft_config["one"], adapter_name="one").eval()
    peft.set_peft_model_state_dict(wrapped, state, adapter_name="one")
    with Engine(plain(), block_size=4) as engine:
        engine.add_adapter("x", state, model.peft_config["one"])
        found = engine.generate(
            [prompt(i) for i in range(12)], max_new_tokens=24, do_sample=False, adapter="x"
        )
    assert [first(output) for output in found] == [
        alone(wrapped, prompt(i), "one", max_new_tokens=24) for i in range(12)
    ]


def test_a_state_dict_of_several_adapters(model: Any) -> None:
    """The one of that name is taken; the last one is no answer."""
    with Engine(plain(), block_size=4) as engine:
        engine.add_adapter("one", model.state_dict(), model.peft_config["one"])
        assert ask(engine, prompt(1), adapter="one") == alone(model, prompt(1), "one")
        with pytest.raises(ValueError, match=r"has the adapters \['one', 'three', 'two'\], and none is 'x'"):
            engine.add_adapter("x", model.state_dict(), model.peft_config["one"])
