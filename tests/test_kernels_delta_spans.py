"""Spans of tokens through the gated delta rule, each behind the state in a slot, held to transformers' function of
one token after another.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import state_spans_in_torch
import torch
from kernel_cases import DEVICE, GPU, load
from state_step_cases import BF16, ERROR, FP32, SOURCE, InSlots, kimi, noise
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

kernels = load()
COUNTS = [70, 1, 64, 3, 129, 5]
"""Chunks that are full, that are not, and a single token."""


def given(
    dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    alike: bool = False,
    by_channel: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as parts of one product; decay and beta."""
    tokens = sum(COUNTS)
    (key_heads, value_heads), (dim, width) = heads, dims
    wide = noise(tokens, 2 * key_heads * dim + value_heads * width, dtype=dtype)
    query, key, value = wide.split([key_heads * dim, key_heads * dim, value_heads * width], -1)
    query, key = (x.view(tokens, key_heads, dim) for x in (query, key))
    beta = noise(tokens, value_heads, dtype=dtype, seed=2).sigmoid()
    gates = (tokens, value_heads, dim) if by_channel else (tokens, value_heads)
    decay = -torch.nn.functional.softplus(noise(*gates, seed=3))
    decay[:70] *= 5  # a chunk of gates whose product is no number of fp32
    if alike:
        key, beta, decay = key[:1].expand_as(key).contiguous(), torch.ones_like(beta), decay * 0
    return query, key, value.view(tokens, value_heads, width), decay, beta


@pytest.mark.parametrize(
    ("dtype", "held", "heads", "dims", "alike", "by_channel"),
    [
        (FP32, FP32, (2, 4), (16, 16), False, False),
        (FP32, FP32, (1, 1), (24, 40), False, False),
        (FP32, FP32, (1, 2), (16, 16), True, False),  # equal keys that forget nothing: the worst of all systems
        (BF16, FP32, (1, 2), (16, 32), False, False),
        (BF16, BF16, (1, 1), (16, 16), False, False),
        (FP32, FP32, (1, 2), (24, 16), False, True),
        (FP32, FP32, (1, 1), (16, 16), True, True),
        (BF16, FP32, (1, 1), (16, 16), False, True),
        *([(BF16, FP32, (16, 32), (128, 128), False, False), (FP32, FP32, (2, 2), (128, 128), True, False),
           (BF16, FP32, (32, 32), (128, 128), False, True)] if GPU else []),
    ],
)  # fmt: skip
def test_spans(
    dtype: torch.dtype,
    held: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    alike: bool,
    by_channel: bool,
) -> None:
    """Elsewhere than they read, in place, without a past, nowhere, of any length."""
    stock = kimi.recurrent_kimi_delta_attention if by_channel else torch_recurrent_gated_delta_rule
    query, key, value, decay, beta = given(dtype, heads, dims, alike, by_channel)
    slots = InSlots((heads[1], *dims), held)
    borders = [0, *accumulate(COUNTS)]
    before, many = slots.gathered().float(), heads[1] // heads[0]
    wanted, after = torch.empty_like(value), torch.empty_like(before)
    for i, (begin, end) in enumerate(pairwise(borders)):
        x = [each[None, begin:end] for each in (query, key, value, decay, beta)]
        x[:2] = [each.repeat_interleave(many, 2) for each in x[:2]]
        answer, state = stock(
            *x[:3], g=x[3], beta=x[4], initial_state=before[i : i + 1], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        wanted[begin:end], after[i] = answer[0], state[0]
    begins, ends = (torch.tensor(each, device=DEVICE) for each in (borders[:-1], borders[1:]))
    out = torch.full_like(value, float("nan"))
    got = kernels.delta_spans(
        query, key, value, decay, beta, *slots.given, begins, ends, out, longest=max(COUNTS), l2norm=True
    )
    assert got is out
    error = 3e-5 if dtype == FP32 else (1.6e-2 if GPU else 4e-2)
    torch.testing.assert_close(got, wanted, rtol=error, atol=error)
    slots.check(after, ERROR[held] if held == BF16 else 1e-4 if dtype == FP32 else 2e-3)


@pytest.mark.parametrize("steps", [kernels, state_spans_in_torch], ids=["kernel", "torch"])
def test_single_tokens_beside_longer_spans(steps: Any) -> None:
    """One kernel steps the spans of a token, the other takes those of several, of unknown length."""
    query, key, value, decay, beta = given(FP32, (1, 2), (16, 16))
    borders = [0, *accumulate(COUNTS)]
    begins, ends = (torch.tensor(each, device=DEVICE) for each in (borders[:-1], borders[1:]))
    together, apart = InSlots((2, 16, 16), FP32), InSlots((2, 16, 16), FP32)
    x = query, key, value, decay, beta
    wanted = kernels.delta_spans(
        *x, *together.given, begins, ends, torch.zeros_like(value), longest=max(COUNTS)
    )
    got = torch.zeros_like(value)
    steps.delta_step(*x, *apart.given, spans=(begins, ends), out=got)
    single = torch.tensor(COUNTS, device=DEVICE) == 1
    assert not got[[i for i in range(len(got)) if i not in begins[single].tolist()]].any()
    steps.delta_spans(*x, *apart.given, begins=begins, ends=ends, out=got, least=2, longest=max(COUNTS))
    torch.testing.assert_close(got, wanted, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(apart.states[:-1], together.states[:-1], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_no_spans_leave_everything() -> None:
    slots = InSlots((2, 16, 16), FP32)
    query, key, value, decay, beta = given(FP32, (1, 2), (16, 16))
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    out = torch.zeros_like(value)
    states = slots.states
    kernels.delta_spans(
        query, key, value, decay, beta, states, nothing, nothing, nothing, nothing, out, longest=0
    )
    assert not out.any()
    assert torch.equal(states.isnan(), slots.before.isnan())


def test_refuses_what_does_not_fit() -> None:
    slots = InSlots((2, 16, 16), FP32)
    query, key, value, decay, beta = given(FP32, (1, 2), (16, 16))
    places = torch.arange(len(SOURCE), device=DEVICE), torch.arange(len(SOURCE), device=DEVICE)
    with pytest.raises(ValueError, match="Invalid shape of query, key, value or out"):
        kernels.delta_spans(query, key[1:], value, decay, beta, *slots.given, *places, value, longest=1)
    with pytest.raises(ValueError, match="Invalid shape of decay or beta"):
        kernels.delta_spans(query, key, value, decay[:, :1], beta, *slots.given, *places, value, longest=1)
