"""Latents (MLA) in pages: decoding steps read them as they are and expand nothing of the past."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from captures import counts, policy, reasons
from cases import every_other
from compare import assert_clean, assert_equal, assert_same, both
from expected import path_of
from latent_models import attention, deepseek, expanded
from releases import LATENTS
from tape import record
from tiny import build, config_class, tiny

import hf_paged
from hf_paged.generate.cache import paged_parts
from hf_paged.generate.install import install_cache, uninstall_cache
from hf_paged.model.mla import METHOD
from hf_paged.model.rehearsal import RECORDERS


def prompts(rows: int = 3, columns: int = 11) -> torch.Tensor:
    return torch.randint(5, 80, (rows, columns), generator=torch.Generator().manual_seed(7))


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sample": {"do_sample": True, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 4},
    "details": {"output_hidden_states": True, "output_attentions": True},
}


@pytest.mark.parametrize(("mode", "padded"), every_other([*MODES], [False, True]))
def test_same_as_stock(mode: str, padded: bool) -> None:
    model, ids = deepseek(), prompts()
    setting, mask = model.config._attn_implementation, torch.ones_like(ids)
    if padded:
        mask[0, :5] = mask[2, :1] = 0
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 10, "do_sample": False, **MODES[mode]}
    paged = assert_same(model, **call, return_dict_in_generate=True, output_logits=True)
    if mode != "details":
        assert path_of(paged_parts(paged.past_key_values)) == "2 full paged"
    del paged
    assert_clean(model, setting)


@LATENTS
def test_nothing_of_the_past_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock expands every token again at every step; on pages no token is."""
    model = deepseek()
    stock, paged = expanded(model, monkeypatch), []
    model.generate(prompts(), max_new_tokens=6, min_new_tokens=6)
    assert stock == [11, 12, 13, 14, 15, 16]
    stock.clear()
    paged = stock
    model.generate(prompts(), max_new_tokens=6, min_new_tokens=6, cache_implementation="paged")
    assert paged == []


@LATENTS
def test_a_long_prompt_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many new tokens at wide latents: expanding them once is less work than taking every query to the
    latents.
    """
    values = tiny(config_class("causal", "deepseek_v3")) | {"kv_lora_rank": 32}
    torch.manual_seed(0)
    model = type(deepseek())(config_class("causal", "deepseek_v3")(**values)).eval()
    model.generation_config.pad_token_id = 0
    seen = expanded(model, monkeypatch)
    stock = model.generate(prompts(), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    seen.clear()
    assert torch.equal(
        stock,
        model.generate(
            prompts(), max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation="paged"
        ),
    )
    # 11 * (2 * 32 - 8 - 8) > 32 * (8 + 8) >= 1 * (2 * 32 - 8 - 8)
    assert seen == [11]


@LATENTS
@pytest.mark.parametrize("what", ["adapter", "hook", "bias"])
def test_more_than_a_matrix(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection that does more is called as it is, on a dense copy."""
    model = deepseek()
    if what == "adapter":
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False)
        ).eval()
    elif what == "hook":
        attention(model).kv_b_proj.register_forward_hook(lambda module, args, output: output * 1.1)
    else:
        attention(model).kv_b_proj.bias = torch.nn.Parameter(torch.full((64,), 0.1))
    stock, paged = both(
        model,
        input_ids=prompts(),
        max_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert "dense" in path_of(paged_parts(paged.past_key_values))
    assert_equal(stock, paged)


def test_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step over latents is replayed."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    model = deepseek()
    assert_same(model, input_ids=prompts(), max_new_tokens=12, do_sample=False, num_beams=2)
    assert counts(model)["replayed"], reasons(model)


def test_half_precision() -> None:
    """In bfloat16 the two orders of multiplying round differently, by no more than that."""
    model, ids = deepseek().to(torch.bfloat16), prompts()
    cache = hf_paged.PagedCache(model, block_size=4)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        paged = model(ids[:, -1:], past_key_values=cache).logits.float()
        exact = model.float()(ids).logits[:, -1:]
    assert (paged - exact).abs().max() < 0.05 * exact.abs().max()


def test_known_by_its_code() -> None:
    """Other families' expansions wait too, whether DeepSeek's waits already or not."""
    for family in ("deepseek_v3", "minicpm3", "youtu"):
        model = build("causal", config_class("causal", family))
        answer = model.generate(
            prompts(), max_new_tokens=3, cache_implementation="paged", return_dict_in_generate=True
        )
        assert path_of(paged_parts(answer.past_key_values)) == "2 full paged"


@LATENTS
def test_uninstalled_classes_are_as_before() -> None:
    model = deepseek()
    cls = type(attention(model))
    model.generate(prompts(), max_new_tokens=2, cache_implementation="paged")
    assert hasattr(getattr(cls, METHOD), "__wrapped__")
    uninstall_cache()
    try:
        assert not hasattr(getattr(cls, METHOD), "__wrapped__")
        assert sys.modules[cls.__module__].DeepseekV3Attention is cls
    finally:
        install_cache()
