"""Every family in every mode gives stock's tokens, on pages."""

from __future__ import annotations

import pytest
import torch
from compare import assert_clean, assert_same
from families import FAMILIES, VOCABULARY, Family, build
from modes import MODES, supported

CELLS = [(family, mode) for family in FAMILIES for mode in MODES if supported(mode, family.seq2seq)]


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
    answer = assert_same(model, **arguments)
    del answer
    assert_clean(model, setting)
