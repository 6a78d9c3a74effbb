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
from captures import counts, policy, reasons
from changed_models import noticed, scored
from compare import assert_equal, both
from prefix_reuse import words
from quantized_layers import EightBit, FourBit, Grouped
from tape import record
from torch import nn

import hf_paged
from hf_paged import Engine
from hf_paged.model.quantized import looks_around, scales_of
from hf_paged.model.rehearsal import RECORDERS


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


def edit_in_dict(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.meta["scale"].data *= 3


def edit_in_inner_dict(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.meta["meta_scale"]["scale"].data *= 3


def replace_in_dict(model: Any) -> None:
    meta = model.model.layers[0].self_attn.v_proj.meta
    meta["scale"] = meta["scale"] * 3


@pytest.mark.parametrize(
    "change", [edit_in_dict, edit_in_inner_dict, replace_in_dict], ids=lambda change: change.__name__
)
def test_c24_scales_in_a_dict_of_the_module(llama: Any, change: Any) -> None:
    noticed(quantize(llama, Grouped), change)


CHANGES = {
    FourBit: [edit_first, edit_second, replace_first],
    EightBit: [edit_state, replace_state],
    Grouped: [edit_in_dict, edit_in_inner_dict, replace_in_dict],
}


@pytest.mark.parametrize("kind", CHANGES)
def test_quantized_layers_are_captured_and_scales_that_change_are_read_anew(
    llama: Any, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph knows scales as it knows weights: those written in place are read, others make another graph."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    quantize(llama, kind)
    call = {"input_ids": words(2, 9), "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    call |= {"return_dict_in_generate": True, "output_logits": True}
    for change in (lambda model: None, *CHANGES[kind]):
        change(llama)
        before = counts(llama)["replayed"]
        assert_equal(*both(llama, **call))
        assert counts(llama)["replayed"] > before, reasons(llama)


@pytest.mark.parametrize("kind", CHANGES)
def test_scales_that_change_under_a_running_request_are_noticed(llama: Any, kind: type) -> None:
    engine = Engine(quantize(llama, kind), num_blocks=32, block_size=4)
    try:
        handle = engine.submit([5, 6, 7, 8], max_new_tokens=8, min_new_tokens=8)
        engine.step()
        CHANGES[kind][0](llama)
        with torch.no_grad():
            _scale_of(llama).add_(0)  # as torch counts writes
        with pytest.raises(RuntimeError, match="weights have changed"):
            handle.result()
    finally:
        engine.close()


def _scale_of(model: Any) -> torch.Tensor:
    layer = model.model.layers[0].self_attn.v_proj
    return next(scales_of(layer, next(layer.parameters())))


def test_layers_that_round_by_the_batch_keep_prompts_private(llama: Any) -> None:
    quantize(llama, EightBit, threshold=6.0)
    for expected in (1, 2):
        assert scored(llama)[0] == 45
        assert (
            hf_paged.stats(llama).reasons[
                "a quantized layer rounds a token depending on the rest of its batch"
            ]
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
