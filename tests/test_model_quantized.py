"""Scales that lie beside quantized weights are part of a model's state (C24); layers that round by the batch
keep prompts private.

Layers that keep their scales where bitsandbytes and torchao do, so that no package is needed;
tests/test_quantized.py takes the real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from changed_models import noticed, scored
from quantized_layers import EightBit, levels
from torch import nn
from torch.nn.functional import linear

import hf_paged
from hf_paged.model.quantized import looks_around, scales_of


class FourBit(nn.Linear):
    """Scales hang on the weight, and scales of scales on them."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        self.weight = levels(plain.weight.data.clone(), torch.ones(plain.out_features, 1), torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.weight.quant_state
        return linear(x, self.weight.data * (state.absmax * state.state2.absmax))


def quantize(model: Any, kind: type, **options: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.v_proj = kind(layer.self_attn.v_proj, **options)
    return model


def edit_first(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.weight.quant_state.absmax.data *= 3


def edit_second(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.weight.quant_state.state2.absmax.data *= 3


def replace_first(model: Any) -> None:
    state = model.model.layers[0].self_attn.v_proj.weight.quant_state
    state.absmax = state.absmax * 3


@pytest.mark.parametrize(
    "change", [edit_first, edit_second, replace_first], ids=lambda change: change.__name__
)
def test_c24_scales_on_a_weight(llama: Any, change: Any) -> None:
    noticed(quantize(llama, FourBit), change)


def edit_state(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.state.SCB.data *= 3


def replace_state(model: Any) -> None:
    state = model.model.layers[0].self_attn.v_proj.state
    state.SCB = state.SCB * 3


@pytest.mark.parametrize("change", [edit_state, replace_state], ids=lambda change: change.__name__)
def test_c24_scales_in_a_module(llama: Any, change: Any) -> None:
    noticed(quantize(llama, EightBit), change)


def test_layers_that_round_by_the_batch_keep_prompts_private(llama: Any) -> None:
    quantize(llama, EightBit, threshold=6.0)
    for expected in (1, 2):
        assert scored(llama)[0] == 45
        assert (
            hf_paged.stats(llama).reasons["a quantized layer rounds a token by what else is computed with it"]
            == expected
        )


class PerTensor: ...


class PerRow: ...


@pytest.mark.parametrize(
    ("granularity", "fixed", "around"),
    [(PerTensor, None, True), (PerRow, None, False), (PerTensor, 1.0, False)],
)
def test_a_scale_for_all_activations(granularity: type, fixed: float | None, around: bool) -> None:
    """One scale for a whole tensor is the largest token's, unless it was fixed beforehand."""
    weight = SimpleNamespace(
        act_quant_kwargs=SimpleNamespace(granularity=granularity()), act_quant_scale=fixed
    )
    assert looks_around(nn.Linear(2, 2), weight) is around


def test_plain_layers_have_nothing_beside(llama: Any) -> None:
    for module in llama.modules():
        for weight in module.parameters(recurse=False):
            assert not list(scales_of(module, weight))
            assert not looks_around(module, weight)
