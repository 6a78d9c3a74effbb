"""One token through recurrent states in slots, held to transformers' functions of one token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, GPU

jamba = pytest.importorskip("transformers.models.jamba.modeling_jamba")
kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
nemotron = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
BF16, FP32 = torch.bfloat16, torch.float32
# The interpreter cuts off where bfloat16 should be rounded: twice the error.
ERROR = {FP32: 1e-5, BF16: 1.6e-2 if GPU else 4e-2}
SLOTS = 9
SOURCE = [7, 2, -1, 0, 5, -1]
TARGET = [1, 2, 6, 3, -1, -1]
"""Rows that write elsewhere than they read, in place, without a past, nowhere, and one beyond the batch."""


def noise(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class InSlots:
    """States of SLOTS slots, NaN where no row reads, and what a step has to leave there."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.source = torch.tensor(SOURCE, device=DEVICE)
        self.target = torch.tensor(TARGET, device=DEVICE)
        filled = noise(SLOTS, *shape, seed=9).to(dtype)
        self.before = torch.full_like(filled, float("nan"))
        held = self.source[self.source >= 0]
        self.before[held] = filled[held]
        self.states = self.before.clone()

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        return self.states, self.source, self.target

    def gathered(self) -> torch.Tensor:
        """The states [rows, ...] as a layer of stock would hold them."""
        found = self.before[self.source.clamp(min=0)]
        found[self.source < 0] = 0
        return found

    def check(self, after: torch.Tensor, error: float) -> None:
        """Rows have left `after` [rows, ...] in the slots that they write, and other slots are as before; the
        last may be anything, since rows that write nowhere may write there.
        """
        wanted = self.before.clone()
        written = self.target >= 0
        wanted[self.target[written]] = after[written].to(wanted.dtype)
        torch.testing.assert_close(self.states[:-1], wanted[:-1], rtol=error, atol=error, equal_nan=True)


def check_conv(
    steps: Any, dtype: torch.dtype, held: torch.dtype, bias: bool, channels: int, taps: int
) -> None:
    """steps: the kernels, or the same in plain torch."""
    slots = InSlots((channels, taps), held)
    x = noise(len(SOURCE), 2, channels, dtype=dtype)[:, 1]
    weight = noise(channels, taps, dtype=dtype, seed=1)
    biases = noise(channels, dtype=dtype, seed=2) if bias else None
    activation = "silu" if bias else None
    state = slots.gathered()
    wanted = qwen.causal_conv1d_update(x.unsqueeze(-1), state, weight, biases, activation)[..., 0]
    got = steps.conv_step(x, weight, biases, *slots.given, activation=activation)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])
    slots.check(state, 1e-2 if held != dtype else 0)


def check_delta(
    steps: Any, dtype: torch.dtype, held: torch.dtype, heads: tuple[int, int], dims: tuple[int, int],
    by_channel: bool,
) -> None:  # fmt: skip
    """The gated delta rule of Qwen3.5, or Kimi's with a gate for each channel."""
    rows = len(SOURCE)
    key_heads, value_heads = heads
    dim, width = dims
    slots = InSlots((value_heads, dim, width), held)
    wide = noise(rows, 1, (2 * key_heads * dim) + value_heads * width, dtype=dtype)
    query, key, value = wide.split([key_heads * dim, key_heads * dim, value_heads * width], -1)
    query, key = (x.view(rows, 1, key_heads, dim) for x in (query, key))
    value = value.view(rows, 1, value_heads, width)
    beta = noise(rows, 1, value_heads, dtype=dtype, seed=2).sigmoid()
    gate = (rows, 1, value_heads, dim) if by_channel else (rows, 1, value_heads)
    decay = -torch.nn.functional.softplus(noise(*gate, seed=3))
    stock = kimi.recurrent_kimi_delta_attention if by_channel else qwen.torch_recurrent_gated_delta_rule
    many = value_heads // key.shape[2]  # transformers 5.17 repeats them before the function
    wanted, after = stock(
        *(x.repeat_interleave(many, 2) for x in (query, key)), value, g=decay, beta=beta, initial_state=slots.gathered(), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    given = [x[:, 0] for x in (query, key, value, decay, beta)]
    got = steps.delta_step(*given, *slots.given, l2norm=True)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted[:, 0], rtol=ERROR[dtype], atol=ERROR[dtype])
    slots.check(after, max(ERROR[FP32], ERROR[held]))


def check_ssm(
    steps: Any, dtype: torch.dtype, held: torch.dtype, heads: int, groups: int, dims: tuple[int, int],
    whole: bool,
) -> None:  # fmt: skip
    """Mamba-2's step as Falcon-H1 calls it; not whole: without D, dt_bias and gate, and dt as it is."""
    rows = len(SOURCE)
    width, dim = dims
    slots = InSlots((heads, width, dim), held)
    x = noise(rows, heads, width, dtype=dtype)
    dt = noise(rows, heads, dtype=dtype, seed=1) if whole else noise(rows, heads, dtype=dtype, seed=1).abs()
    A = -noise(heads, seed=2).exp()
    B, C = noise(rows, 2, groups, dim, dtype=dtype, seed=3).unbind(1)
    D = noise(heads, dtype=dtype, seed=4) if whole else None
    dt_bias = noise(heads, dtype=dtype, seed=5) if whole else None
    gate = noise(rows, heads, width, dtype=dtype, seed=6) if whole else None
    state = slots.gathered()
    wanted = nemotron.mamba2_selective_state_update(
        state, x, dt[..., None].expand(-1, -1, width), A[:, None, None].expand(-1, width, dim), B, C,
        None if D is None else D[:, None].expand(-1, width),
        dt_bias=None if dt_bias is None else dt_bias[:, None].expand(-1, width), dt_softplus=whole,
        z=gate,
    )  # fmt: skip
    got = steps.ssm_step(x, dt, A, B, C, D, dt_bias, *slots.given, gate=gate, softplus=whole)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted, rtol=ERROR[dtype], atol=ERROR[dtype] * 4)
    slots.check(state, max(ERROR[dtype], ERROR[held]))


def check_scan(
    steps: Any, dtype: torch.dtype, held: torch.dtype, channels: int, dim: int, whole: bool
) -> None:
    """Mamba's step as Jamba calls it; not whole: without D, dt_bias and gate, and dt as it is."""
    rows = len(SOURCE)
    slots = InSlots((channels, dim), held)
    x, dt, gate = noise(rows, 3, channels, dtype=dtype).unbind(1)
    A = -noise(channels, dim, seed=2).exp()
    B, C = noise(rows, 2, dim, dtype=dtype, seed=3).unbind(1)
    D = noise(channels, dtype=dtype, seed=4)
    bias = noise(channels, seed=5)
    given = {"D": D, "dt_bias": bias, "dt_softplus": True, "z": gate} if whole else {}
    dt = dt if whole else dt.abs()
    state = slots.gathered()
    wanted = jamba.mamba_selective_state_update(state, x, dt, A, B, C, **given)
    more = (D, bias) if whole else (None, None)
    got = steps.scan_step(x, dt, A, B, C, *more, *slots.given, gate=given.get("z"), softplus=whole)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted, rtol=ERROR[dtype], atol=ERROR[dtype] * 4)
    slots.check(state, max(ERROR[dtype], ERROR[held]))
