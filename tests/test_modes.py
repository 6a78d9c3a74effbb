"""Every mode gives stock's tokens, on pages: each kind of attention in all of them, each family in a third."""

from __future__ import annotations

import itertools

import pytest
import tiny
import torch
import transformers
from cases import every_other, once_each
from compare import assert_clean, assert_equal, assert_same
from families import FAMILIES, VOCABULARY, Family, build
from fused_models import Kernels, captured_steps
from modes import MODES, supported
from releases import NEEDS_SLOTS

STOCK_LOSES_WINDOWS = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 19)
"""True if stock's own sliding cache breaks when an assistant drafts several tokens."""

KINDS = ["llama", "gemma2", "gpt-oss", "bloom", "bart"]
"""A family of each kind of attention: these run in all modes."""


CELLS = [
    (family, mode)
    for family, mode in [
        *itertools.product([family for family in FAMILIES if family.name in KINDS], MODES),
        *every_other([family for family in FAMILIES if family.name not in KINDS], [*MODES], every=3),
    ]
    if supported(mode, family.seq2seq)
]


@pytest.fixture(scope="module")
def models() -> dict[str, object]:
    return {}


def _model(models: dict[str, object], family: Family) -> object:
    if family.name not in models:
        model, assistant = build(family), build(family)
        with torch.no_grad():
            # An assistant that is often right and sometimes not: rounds of every length.
            for parameter in assistant.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        object.__setattr__(model, "assistant", assistant)
        models.clear()
        models[family.name] = model
    return models[family.name]


@pytest.mark.parametrize(("family", "mode"), CELLS, ids=[f"{family.name}-{mode}" for family, mode in CELLS])
def test_same_as_stock(models: dict[str, object], family: Family, mode: str) -> None:
    """C3, C14, C16, C36: blocks of 4 tokens, so that every mode forks, copies and crosses blocks."""
    model = _model(models, family)
    setting = model.config._attn_implementation
    ids = torch.randint(5, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(len(family.name)))
    arguments = {"input_ids": ids, **MODES[mode](model, ids)}
    if "attention_mask" not in arguments:
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    if (
        mode == "assisted"
        and STOCK_LOSES_WINDOWS
        and len(set(getattr(model.config, "layer_types", None) or ())) > 1
    ):
        # Assisted decoding changes the speed and not the tokens, so plain greedy is the reference where stock
        # raises.
        stock = model.generate(**{**arguments, "assistant_model": None})
        assert_equal(
            stock, model.generate(**arguments, cache_implementation="paged", cache_config={"block_size": 4})
        )
    else:
        assert_same(model, **arguments)
    assert_clean(model, setting)


HYBRIDS = ["qwen3_5_text", "nemotron_h", "lfm2", "kimi_linear", "zaya", "falcon_h1", "olmo_hybrid", "zamba2"]
STATEFUL = [
    mode for mode in MODES if supported(mode, seq2seq=False) and mode not in ("assisted", "prompt-lookup")
]
"""The modes that transformers has for models with recurrent states."""


@NEEDS_SLOTS
@pytest.mark.parametrize(("family", "mode"), once_each(HYBRIDS, STATEFUL))
def test_hybrids_are_the_same_as_stock(family: str, mode: str) -> None:
    """States of kept caches too; each mode with one family."""
    model = tiny.build("causal", tiny.config_class("causal", family))
    setting = model.config._attn_implementation
    ids = torch.randint(5, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(len(family)))
    arguments = {"attention_mask": torch.ones_like(ids), "input_ids": ids}
    assert_same(model, **{**arguments, **MODES[mode](model, ids)})
    assert_clean(model, setting)


FUSED = [
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "gpt_oss",
    "olmo3",
    "phi3",
    "qwen3_moe",
    "cohere",
    "lfm2",
]


@pytest.mark.parametrize(("family", "mode"), once_each(FUSED, STATEFUL))
def test_fused_steps_are_the_same_as_stock(family: str, mode: str) -> None:
    """Captured steps whose small operations are computed in chains; `scripts/sweep_models.py --fused` has all families."""
    model = tiny.build("causal", tiny.config_class("causal", family))
    ids = torch.randint(5, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(len(family)))
    kernels = Kernels()
    with captured_steps(kernels):
        assert_same(
            model, **{"attention_mask": torch.ones_like(ids), "input_ids": ids, **MODES[mode](model, ids)}
        )
    assert kernels.calls["chain"]
