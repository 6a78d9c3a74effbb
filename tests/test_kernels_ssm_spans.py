"""Spans of tokens through Mamba-2's selective scan, each behind the state in a slot, held to transformers' function
of several tokens.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import state_spans_in_torch
import torch
from kernel_cases import DEVICE, GPU, load
from state_step_cases import BF16, ERROR, FP32, SOURCE, InSlots, nemotron, noise

kernels = load()
COUNTS = [70, 1, 64, 3, 0, 129]
"""Chunks that are full, that are not, a single token, none."""
LIMIT = (0.2, 1.5)


def borders() -> tuple[torch.Tensor, torch.Tensor]:
    ends = [*accumulate(COUNTS)]
    return torch.tensor([0, *ends[:-1]], device=DEVICE), torch.tensor(ends, device=DEVICE)


def given(
    dtype: torch.dtype, heads: int, groups: int, dims: tuple[int, int], whole: bool
) -> tuple[torch.Tensor | None, ...]:
    """x, B and C as parts of one tensor; not whole: without D and dt_bias."""
    tokens, (width, dim) = sum(COUNTS), dims
    wide = noise(tokens, heads * width + 2 * groups * dim, dtype=dtype)
    x, b, c = wide.split([heads * width, groups * dim, groups * dim], -1)
    b, c = (each.view(tokens, groups, dim) for each in (b, c))
    dt = noise(tokens, heads, dtype=dtype, seed=1)
    skip, bias = (noise(heads, dtype=dtype, seed=seed) if whole else None for seed in (4, 5))
    return x.view(tokens, heads, width), dt, -noise(heads, seed=2).exp(), b, c, skip, bias


@pytest.mark.parametrize(
    ("dtype", "held", "heads", "groups", "dims", "whole"),
    [
        (FP32, FP32, 4, 2, (16, 32), True),
        (FP32, FP32, 1, 1, (40, 24), False),
        (BF16, FP32, 2, 1, (16, 16), True),
        (BF16, BF16, 1, 1, (16, 16), True),
        *([(BF16, FP32, 128, 8, (64, 128), True), (FP32, FP32, 8, 1, (64, 256), True)] if GPU else []),
    ],
)
def test_spans(
    dtype: torch.dtype, held: torch.dtype, heads: int, groups: int, dims: tuple[int, int], whole: bool
) -> None:
    """Elsewhere than they read, in place, without a past, nowhere, of any length; time is limited."""
    slots = InSlots((heads, *dims), held)
    x, dt, rates, b, c, skip, bias = given(dtype, heads, groups, dims, whole)
    before = slots.gathered().float()
    wanted, after = torch.zeros_like(x, dtype=FP32), before.clone()
    for i, (begin, end) in enumerate(pairwise([0, *accumulate(COUNTS)])):
        if end > begin:
            one, time, inputs, outputs = (each[None, begin:end] for each in (x, dt, b, c))
            answer, after[i : i + 1] = nemotron.mamba2_chunk_scan(
                one, time, rates, inputs, outputs, 16, skip, bias, before[i : i + 1], whole, LIMIT, True
            )
            wanted[begin:end] = answer[0]
    out = torch.full_like(x, float("nan")).contiguous()
    got = kernels.ssm_spans(
        x, dt, rates, b, c, skip, bias, *slots.given, *borders(), out, softplus=whole, limit=LIMIT
    )
    assert got is out
    error = 3e-5 if dtype == FP32 else ERROR[BF16]
    torch.testing.assert_close(got.float(), wanted, rtol=error, atol=error * 8)
    slots.target[COUNTS.index(0)] = -1
    slots.check(after, 1e-4 if dtype == held == FP32 else ERROR[BF16])


@pytest.mark.parametrize("steps", [kernels, state_spans_in_torch], ids=["kernel", "torch"])
def test_single_tokens_beside_longer_spans(steps: Any) -> None:
    """One kernel steps the spans of a token, the other takes those of several. The time of prompts is limited, also
    of their first tokens.
    """
    counts = torch.tensor([1, 3, 1, 20, 0, 1], device=DEVICE)
    ends = counts.cumsum(0)
    begins = ends - counts
    tokens = int(ends[-1])
    x = tuple(
        each[:tokens] if i in (0, 1, 3, 4) else each
        for i, each in enumerate(given(FP32, 2, 1, (16, 16), True))
    )
    together, apart = InSlots((2, 16, 16), FP32), InSlots((2, 16, 16), FP32)
    wanted, got = (torch.zeros_like(x[0]).contiguous() for _ in range(2))
    kernels.ssm_spans(*x, *together.given, begins, ends, wanted, softplus=True, limit=LIMIT)
    options = {"out": got, "softplus": True, "limit": LIMIT}
    steps.ssm_step(*x, *apart.given, spans=(begins, ends), **options)
    first = begins[[i for i, slot in enumerate(SOURCE) if slot < 0 and counts[i] == 1]]
    torch.testing.assert_close(got[first], wanted[first], rtol=1e-5, atol=1e-5)
    assert not got[begins[1] : ends[1]].any()
    steps.ssm_spans(*x, *apart.given, begins=begins, ends=ends, least=2, **options)
    longer = torch.cat([torch.arange(int(begins[i]), int(ends[i]), device=DEVICE) for i in (1, 3)])
    torch.testing.assert_close(got[longer], wanted[longer], rtol=3e-5, atol=3e-5)


def test_refuses_what_does_not_fit() -> None:
    slots = InSlots((2, 16, 16), FP32)
    x, *others = given(FP32, 2, 1, (16, 16), True)
    with pytest.raises(ValueError, match="Invalid shape of B or C"):
        kernels.ssm_spans(x[1:], *others, *slots.given, *borders(), x)
    with pytest.raises(ValueError, match="Invalid shape of out"):
        kernels.ssm_spans(x, *others, *slots.given, *borders(), x[1:])
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    out = x.clone()
    assert kernels.ssm_spans(x, *others, slots.states, *[nothing] * 4, out) is out
