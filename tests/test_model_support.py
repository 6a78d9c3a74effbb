"""What is left to stock, by what the cache's layers keep and not by a class's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_clean, both
from tiny import build, build_class, config_class, model_class_of

from hf_paged import FallbackWarning
from hf_paged.model.cache_name import cache_in


def _prompt() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 80, (2, 9), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_a_name_decides_nothing() -> None:
    """A hybrid of the user's that is called Mamba has attention layers, which are paged."""
    config = config_class("causal", "jamba")
    base: Any = model_class_of("causal", config)
    model = build_class(type("OwnMambaForCausalLM", (base,), {}), config, "causal")
    setting = model.config._attn_implementation
    stock, paged = both(model, **_prompt(), max_new_tokens=5, num_beams=3, return_dict_in_generate=True)
    assert torch.equal(stock.sequences, paged.sequences)
    assert cache_in(paged).paths == ["stock", "paged", "stock", "paged"]
    del stock, paged
    assert_clean(model, setting)


@pytest.mark.parametrize("family", ["falcon_mamba", "mamba", "mamba2", "rwkv"])
def test_states_alone_stay_with_stock(family: str) -> None:
    """One warning, with the reason."""
    model = build("causal", config_class("causal", family))
    given = {**_prompt(), "max_new_tokens": 4, "do_sample": False}
    with pytest.warns(FallbackWarning) as said:
        paged = model.generate(**given, cache_implementation="paged")
    texts = [str(each.message) for each in said if each.category is FallbackWarning]
    assert len(texts) == 1
    assert f"{type(model).__name__} keeps a state of its own instead of keys and values" in texts[0]
    assert torch.equal(paged, model.generate(**given))
