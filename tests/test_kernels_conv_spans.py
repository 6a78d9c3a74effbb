"""Spans of tokens through a causal convolution, each behind the state in a slot, held to transformers' function of
one token after another.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import state_spans_in_torch
import torch
from kernel_cases import DEVICE, load
from state_step_cases import BF16, ERROR, FP32, InSlots, noise
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_update

kernels = load()
COUNTS = [70, 1, 2, 0, 33, 3]
"""Of many tokens, of fewer than a state has, of none."""


def borders() -> tuple[torch.Tensor, torch.Tensor]:
    ends = [*accumulate(COUNTS)]
    return torch.tensor([0, *ends[:-1]], device=DEVICE), torch.tensor(ends, device=DEVICE)


@pytest.mark.parametrize(
    ("dtype", "held", "bias", "channels", "taps"),
    [(FP32, FP32, True, 40, 4), (FP32, FP32, False, 130, 3), (BF16, BF16, True, 24, 4), (BF16, FP32, False, 8, 2)],
)  # fmt: skip
@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("steps", [kernels, state_spans_in_torch], ids=["kernel", "torch"])
def test_spans(
    steps: Any, dtype: torch.dtype, held: torch.dtype, bias: bool, channels: int, taps: int, least: int
) -> None:
    """Elsewhere than they read, in place, without a past, nowhere, of any length; tokens of no span are zero."""
    slots = InSlots((channels, taps), held)
    x = noise(sum(COUNTS) + 3, 2, channels, dtype=dtype)[:, 1]
    weight = noise(channels, taps, dtype=dtype, seed=1)
    biases = noise(channels, dtype=dtype, seed=2) if bias else None
    activation = "silu" if bias else None
    states = slots.gathered()
    wanted = torch.zeros_like(x)
    for i, (begin, end) in enumerate(pairwise([0, *accumulate(COUNTS)])):
        for at in range(begin, end):
            state = states[i : i + 1]
            wanted[at] = causal_conv1d_update(x[at][None, :, None], state, weight, biases, activation)[
                0, :, 0
            ]
    begins, ends = borders()
    options = {"out": torch.zeros_like(x).contiguous(), "activation": activation}
    if least > 1:  # beside the kernel of single tokens
        steps.conv_step(x, weight, biases, *slots.given, spans=(begins, ends), **options)
    got = steps.conv_spans(x, weight, biases, *slots.given, begins=begins, ends=ends, least=least, **options)
    assert got is options["out"]
    torch.testing.assert_close(got, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])
    moved = torch.tensor([count > 0 for count in COUNTS], device=DEVICE)
    slots.target = slots.target.where(moved, -1)
    slots.check(states, 1e-2 if held != dtype else 0)


def test_few_longer_spans_among_many() -> None:
    """They are found, wherever they are."""
    counts = torch.ones(300, dtype=torch.int32, device=DEVICE)
    counts[[5, 256, 299]] = torch.tensor([3, 2, 4], dtype=torch.int32, device=DEVICE)
    counts[9] = 0
    ends = counts.cumsum(0).int()
    x, weight = noise(int(ends[-1]), 4), noise(4, 3, seed=1)
    states = noise(301, 4, 3, seed=2)
    found, wanted = states.clone(), states.clone()
    slots = torch.arange(300, device=DEVICE)
    out, expected = torch.zeros_like(x), torch.zeros_like(x)
    for kernel, held, answers in ((kernels, found, out), (state_spans_in_torch, wanted, expected)):
        borders = {"begins": ends - counts, "ends": ends, "least": 2, "out": answers}
        kernel.conv_spans(x, weight, None, held, slots, slots, **borders)
    assert expected.any(1).sum() == 9
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found[:-1], wanted[:-1])


def test_refuses_what_does_not_fit() -> None:
    slots = InSlots((8, 4), FP32)
    x, weight = noise(sum(COUNTS), 8), noise(8, 4)
    with pytest.raises(ValueError, match="Invalid activation 'gelu'"):
        kernels.conv_spans(x, weight, None, *slots.given, *borders(), out=x, activation="gelu")
    with pytest.raises(ValueError, match="Invalid shape of weight"):
        kernels.conv_spans(x, weight[:4], None, *slots.given, *borders(), out=x)
    with pytest.raises(ValueError, match="Invalid shape of out"):
        kernels.conv_spans(x, weight, None, *slots.given, *borders(), out=x[:2])
