"""Rows of a weight by slot against a loop over the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, load

kernels = load()
BF16, FP32 = torch.bfloat16, torch.float32
CLOSE = {FP32: 1e-6, BF16: 1e-2}
IDS, WIDTH = 300, 40
INDEX = [2, 0, -1, 1, 3, 0, 2, -1, 1, 2]
"""The slots of tokens; the adapter of slot 3 leaves the module as it is."""


def noise(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Weights:
    """A module's weight, and that of each slot: all rows of slot 0, some of slots 1 and 2."""

    def __init__(self, dtype: torch.dtype = FP32) -> None:
        self.base = noise(IDS, WIDTH, dtype=dtype)
        self.table = kernels.SlotRows(2, 4, dtype, DEVICE)
        self.parts: dict[int, Any] = {}
        self.put(0, noise(IDS, WIDTH, dtype=dtype, seed=1), None, noise(IDS, seed=9), 1.0)
        self.put(1, noise(3, WIDTH, dtype=dtype, seed=2), torch.tensor([7, 299, 0], device=DEVICE), None, 2.5)
        many = torch.randperm(IDS, generator=torch.Generator().manual_seed(4))[:270].to(DEVICE)
        self.put(2, noise(270, WIDTH, dtype=dtype, seed=3), many, None, 1.0)

    def put(self, slot: int, rows: torch.Tensor, ids: Any, bias: Any, scale: float) -> None:
        self.parts[slot] = rows, ids, bias, scale
        self.table.put(1, slot, rows, ids, bias, scale)
        self.table.upload()

    def of(self, slot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A slot's whole weight in float64, its biases, and which rows are its own."""
        weight, bias = self.base.double(), torch.zeros(IDS, dtype=torch.float64, device=DEVICE)
        own = torch.zeros(IDS, dtype=torch.bool, device=DEVICE)
        if slot in self.parts:
            rows, ids, biases, _ = self.parts[slot]
            where = slice(None) if ids is None else ids
            weight[where], own[where] = rows.double(), True
            bias = bias if biases is None else biases.double()
        return weight, bias, own


def ints(index: list[int]) -> torch.Tensor:
    return torch.tensor(index, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_embeddings(dtype: torch.dtype) -> None:
    """A token of a slot has the slot's row, scaled; others keep what is there, bit for bit."""
    weights = Weights(dtype)
    ids = torch.tensor([299, 5, 7, 7, 7, 0, 299, 1, 8, 4], device=DEVICE)
    out = weights.base[ids].clone()
    before = out.clone()
    kernels.slot_embed(out, ids, ints(INDEX), weights.table, 1)
    changed = 0
    for token, slot in enumerate(INDEX):
        whole, _, own = weights.of(slot)
        if own[ids[token]]:
            scale = weights.parts[slot][3]
            close = 0 if scale == 1 else CLOSE[dtype]  # the interpreter cuts digits off
            torch.testing.assert_close(out[token].double(), whole[ids[token]] * scale, rtol=close, atol=0)
            changed += 1
        else:
            assert torch.equal(out[token], before[token])
    assert 3 < changed < len(INDEX)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_products(dtype: torch.dtype) -> None:
    """Logits of a slot's rows are its own, those of other ids and tokens stay bit for bit."""
    weights = Weights(dtype)
    x = noise(len(INDEX), WIDTH, dtype=dtype, seed=5)
    out = noise(len(INDEX), IDS + 8, dtype=dtype, seed=6)[:, :IDS]
    before = out.clone()
    plan = kernels.AdapterPlan(len(INDEX), 4, DEVICE)
    plan.update(ints(INDEX))
    kernels.slot_product(out, x, plan, weights.table, 1)
    close = 1e-4 if dtype == FP32 else 5e-2
    for token, slot in enumerate(INDEX):
        whole, bias, own = weights.of(slot)
        expected = x[token].double() @ whole.T + bias
        torch.testing.assert_close(out[token, own].double(), expected[own], atol=close * 4, rtol=close)
        assert torch.equal(out[token, ~own], before[token, ~own])


def test_a_slot_that_is_given_to_another() -> None:
    """Tables are read again by each launch: an adapter that goes leaves the base, another one has its own."""
    weights = Weights()
    x = noise(1, WIDTH, seed=5)
    plan = kernels.AdapterPlan(1, 4, DEVICE)
    plan.update(ints([0]))
    out = torch.zeros(1, IDS, device=DEVICE)
    weights.table.clear(0)
    weights.table.upload()
    kernels.slot_product(out, x, plan, weights.table, 1)
    assert not out.any()
    weights.put(0, noise(2, WIDTH, seed=8), torch.tensor([4, 2], device=DEVICE), None, 1.0)
    kernels.slot_product(out, x, plan, weights.table, 1)
    assert out[0].nonzero().flatten().tolist() == [2, 4]


def test_what_kernels_cannot_read_is_refused() -> None:
    table = kernels.SlotRows(1, 2, BF16, DEVICE)
    with pytest.raises(ValueError, match=r"Invalid rows: expected torch.bfloat16, aligned"):
        table.put(0, 0, noise(4, 8))
    with pytest.raises(ValueError, match=r"expected ids and index \[2\]"):
        kernels.slot_embed(noise(2, 8), torch.zeros(3, dtype=torch.long), ints([0, 0]), table, 0)
