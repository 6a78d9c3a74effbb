"""Spans of tokens through Mamba's selective scan, each behind the state in a slot, held to plain torch."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from kernel_cases import DEVICE, load
from state_step_cases import BF16, ERROR, FP32, SLOTS, SOURCE, InSlots, noise

from hf_paged.kv.state_scans import scan_tokens

kernels = load()
COUNTS = [9, 1, 16, 3, 20, 5]


@pytest.mark.parametrize(
    ("dtype", "held", "channels", "dim"),
    [(FP32, FP32, 300, 16), (FP32, FP32, 24, 12), (BF16, FP32, 64, 16), (BF16, BF16, 64, 16)],
)
def test_spans(dtype: torch.dtype, held: torch.dtype, channels: int, dim: int) -> None:
    """Elsewhere than they read, in place, without a past, nowhere, of any length."""
    tokens = sum(COUNTS)
    slots = InSlots((channels, dim), held)
    x, times = noise(tokens, 2, channels, dtype=dtype).unbind(1)
    times = torch.nn.functional.softplus(times)
    b, c = noise(tokens, 2, dim, dtype=dtype, seed=1).unbind(1)
    rates = -noise(channels, dim, seed=2).exp()
    borders = [0, *accumulate(COUNTS)]
    before = slots.gathered().float()
    wanted, after = torch.empty_like(x), torch.empty_like(before)
    for i, (begin, end) in enumerate(pairwise(borders)):
        given = (each[None, begin:end] for each in (x, times, b, c))
        one, time, inputs, outputs = given
        answer, after[i : i + 1] = scan_tokens(one, time, rates, inputs, outputs, before[i : i + 1])
        wanted[begin:end] = answer[0]
    begins, ends = (torch.tensor(each, device=DEVICE) for each in (borders[:-1], borders[1:]))
    got = kernels.scan_spans(x, times, rates, b, c, *slots.given, begins, ends, torch.empty_like(x))
    torch.testing.assert_close(got, wanted, rtol=ERROR[dtype], atol=ERROR[dtype] * 4)
    slots.check(after, max(ERROR[FP32], ERROR[held]))


def test_refuses_what_does_not_fit() -> None:
    slots = InSlots((8, 4), FP32)
    x, b = noise(6, 8), noise(6, 4)
    ends = torch.arange(1, len(SOURCE) + 1, device=DEVICE)
    given = *slots.given, ends - 1, ends
    with pytest.raises(ValueError, match="Invalid shape of times or out"):
        kernels.scan_spans(x, x[:, :2], noise(8, 4), b, b, *given, x.clone())
    with pytest.raises(ValueError, match="Invalid shape of A, B or C"):
        kernels.scan_spans(x, x, noise(8, 4), b, b[:2], *given, x.clone())
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    states = noise(SLOTS, 8, 4)
    out = x.clone()
    assert kernels.scan_spans(x, x, noise(8, 4), b, b, states, *[nothing] * 4, out) is out
