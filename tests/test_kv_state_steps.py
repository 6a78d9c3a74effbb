"""One token through states in slots equals transformers' functions, by kernels and in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import load
from state_step_cases import BF16, FP32, check_conv, check_delta, check_scan, check_ssm

from hf_paged.kv import state_steps

STEPS = pytest.mark.parametrize("steps", [load(), state_steps], ids=["kernels", "torch"])
DTYPES = pytest.mark.parametrize(
    ("dtype", "held"),
    [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP32, BF16)],
    ids=["fp32", "bf16", "bf16-states", "fp32-bf16-states"],
)


@STEPS
@DTYPES
@pytest.mark.parametrize(
    ("bias", "channels", "taps"), [(True, 300, 4), (False, 16, 3)], ids=["bias-and-silu", "plain"]
)
def test_a_convolution(
    steps: Any, dtype: torch.dtype, held: torch.dtype, bias: bool, channels: int, taps: int
) -> None:
    check_conv(steps, dtype, held, bias, channels, taps)


@STEPS
@DTYPES
@pytest.mark.parametrize(
    ("heads", "dims", "by_channel"),
    [((2, 4), (16, 32), False), ((3, 3), (24, 20), False), ((2, 2), (16, 16), True)],
    ids=["shared-keys", "odd", "by-channel"],
)
def test_a_gated_delta_rule(
    steps: Any,
    dtype: torch.dtype,
    held: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    by_channel: bool,
) -> None:
    check_delta(steps, dtype, held, heads, dims, by_channel)


@STEPS
@DTYPES
@pytest.mark.parametrize(
    ("heads", "groups", "dims", "whole"),
    [(4, 2, (16, 32), True), (3, 1, (20, 24), False)],
    ids=["groups", "odd"],
)
def test_a_selective_scan_by_heads(
    steps: Any,
    dtype: torch.dtype,
    held: torch.dtype,
    heads: int,
    groups: int,
    dims: tuple[int, int],
    whole: bool,
) -> None:
    check_ssm(steps, dtype, held, heads, groups, dims, whole)


@STEPS
@DTYPES
@pytest.mark.parametrize(
    ("channels", "dim", "whole"), [(300, 16, True), (24, 12, False)], ids=["whole", "odd"]
)
def test_a_selective_scan(
    steps: Any, dtype: torch.dtype, held: torch.dtype, channels: int, dim: int, whole: bool
) -> None:
    check_scan(steps, dtype, held, channels, dim, whole)
