"""Spans of tokens through Mamba's selective scan, each behind the state in a slot, held to plain torch."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import state_spans_in_torch
import torch
from kernel_cases import DEVICE, load
from state_step_cases import BF16, ERROR, FP32, SLOTS, SOURCE, InSlots, noise

from hf_paged.kv.state_scans import scan_tokens

kernels = load()
COUNTS = [9, 1, 16, 3, 20, 0]


@pytest.mark.parametrize(
    ("dtype", "held", "channels", "dim"),
    [(FP32, FP32, 72, 16), (FP32, FP32, 24, 12), (BF16, FP32, 64, 16), (BF16, BF16, 64, 16)],
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
    wanted, after = torch.empty_like(x), before.clone()
    for i, (begin, end) in enumerate(pairwise(borders)):
        given = (each[None, begin:end] for each in (x, times, b, c))
        one, time, inputs, outputs = given
        answer, after[i : i + 1] = scan_tokens(one, time, rates, inputs, outputs, before[i : i + 1])
        wanted[begin:end] = answer[0]
    begins, ends = (torch.tensor(each, device=DEVICE) for each in (borders[:-1], borders[1:]))
    out = torch.empty_like(x)
    got = kernels.scan_spans(x, times, rates, b, c, None, None, *slots.given, begins, ends, out)
    assert got is out
    torch.testing.assert_close(got, wanted, rtol=ERROR[dtype], atol=ERROR[dtype] * 4)
    slots.target[COUNTS.index(0)] = -1
    slots.check(after, max(ERROR[FP32], ERROR[held]))


def test_single_tokens_beside_longer_spans() -> None:
    """One kernel steps the spans of a token, the other takes those of several; with what skips the scan, and a
    gate.
    """
    together, apart = InSlots((24, 12), FP32), InSlots((24, 12), FP32)
    x, dt, gate = noise(sum(COUNTS), 3, 24).unbind(1)
    b, c = noise(sum(COUNTS), 2, 12, seed=1).unbind(1)
    given = x, dt, -noise(24, 12, seed=2).exp(), b, c, noise(24, seed=3), noise(24, seed=4)
    counts = torch.tensor(COUNTS, device=DEVICE)
    begins, ends = counts.cumsum(0) - counts, counts.cumsum(0)
    wanted, got = torch.zeros_like(x), torch.zeros_like(x).contiguous()
    options = {"gate": gate, "softplus": True}
    state_spans_in_torch.scan_spans(*given, *together.given, begins=begins, ends=ends, out=wanted, **options)
    kernels.scan_step(*given, *apart.given, spans=(begins, ends), out=got, **options)
    assert not got[:9].any()
    kernels.scan_spans(*given, *apart.given, begins, ends, got, least=2, **options)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(apart.states[:-1], together.states[:-1], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_refuses_what_does_not_fit() -> None:
    slots = InSlots((8, 4), FP32)
    x, b = noise(6, 8), noise(6, 4)
    ends = torch.arange(1, len(SOURCE) + 1, device=DEVICE)
    given = *slots.given, ends - 1, ends
    with pytest.raises(ValueError, match="Invalid shape of dt, gate, D or dt_bias"):
        kernels.scan_spans(x, x[:, :2], noise(8, 4), b, b, None, None, *given, x.clone())
    with pytest.raises(ValueError, match="Invalid shape of out"):
        kernels.scan_spans(x, x, noise(8, 4), b, b, None, None, *given, x[:2])
    with pytest.raises(ValueError, match="Invalid shape of A, B or C"):
        kernels.scan_spans(x, x, noise(8, 4), b, b[:2], None, None, *given, x.clone())
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    states = noise(SLOTS, 8, 4)
    out = x.clone()
    assert kernels.scan_spans(x, x, noise(8, 4), b, b, None, None, states, *[nothing] * 4, out) is out
