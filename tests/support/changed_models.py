"""Shared by the tests: PROMPT, Steer, blind, noticed, scored, tuned_ask, two_adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import BY_NAME, build
from model_checks import blind_keys
from prefix_reuse import ask, words

from hf_paged.generate import keys
from hf_paged.model import hooks

PROMPT = words(1, 45)


Change = Callable[[Any], None]


def scored(model: Any, ids: torch.Tensor = PROMPT, **arguments: Any) -> list[int]:
    """Ask with scores, compare with stock, and say how many columns were computed of the prompt."""
    return ask(
        model,
        ids,
        4,
        **{"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 2, **arguments},
    )[1]


def blind(patch: pytest.MonkeyPatch) -> None:
    """Key blocks by tokens alone."""
    original = keys.extra_key
    patch.setattr(keys, "extra_key", lambda *parts: original("tokens alone"))
    blind_keys(patch)
    patch.setattr(
        hooks.HookMonitor, "changed", property(lambda self: False, lambda self, value: None), raising=False
    )


def noticed(model: Any, change: Change, ids: torch.Tensor = PROMPT, **arguments: Any) -> None:
    """The change is noticed, and it would be wrong not to notice it."""
    twin = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        blind(patch)
        scored(twin, ids, **arguments)
        change(twin)
        with pytest.raises(AssertionError, match="answer"):
            scored(twin, ids, **arguments)
    assert scored(model, ids, **arguments)[0] == ids.shape[1]
    assert scored(model, ids, **arguments)[0] == 1
    change(model)
    assert scored(model, ids, **arguments)[0] == ids.shape[1]
    assert scored(model, ids, **arguments)[0] == 1


class Steer:
    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        if self.how == "answers":
            return output * 2
        output.mul_(2)
        return None


def two_adapters() -> Any:
    """A Llama with two adapters that do something, of which "one" is active."""
    peft = pytest.importorskip("peft", reason="peft is an extra")
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(build(BY_NAME["llama"]), config, adapter_name="one")
    model.add_adapter("two", config)
    return model.eval()


def tuned_ask(model: Any, ids: torch.Tensor = PROMPT, **arguments: Any) -> int:
    """The columns that are computed of a prompt, of a model in peft's wrapper."""
    from counted_rows import counted

    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 2,
        "do_sample": False,
        **arguments,
    }
    call |= {"return_dict_in_generate": True, "output_scores": True}
    with counted(model.get_base_model()) as seen:
        answer = model.generate(
            **call, cache_implementation="paged", cache_config={"block_size": 4, "prefix_caching": True}
        )
    stock = model.generate(**call)
    for one, other in zip(stock.scores, answer.scores, strict=True):
        torch.testing.assert_close(other, one, atol=2e-4, rtol=2e-4)
    assert torch.equal(stock.sequences, answer.sequences)
    return seen[0][1]
