"""One token through states in slots equals transformers' functions, by kernels and in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import pairwise
from kernel_cases import load
from state_step_cases import BF16, FP32, check_conv, check_delta, check_scan, check_ssm

from hf_paged.kv import state_steps

STEPS = {"kernels": load(), "torch": state_steps}
DTYPES = {
    "fp32": (FP32, FP32),
    "bf16": (BF16, FP32),
    "bf16-states": (BF16, BF16),
    "fp32-bf16-states": (FP32, BF16),
}


def in_pairs(shapes: dict[str, tuple[Any, ...]]) -> Any:
    """Each pair of an implementation, of the dtypes of tokens and states, and of a layer's shapes."""
    return pytest.mark.parametrize(
        ("steps", "dtypes", "shape"),
        [
            pytest.param(STEPS[steps], DTYPES[dtypes], shapes[shape], id=f"{steps}-{dtypes}-{shape}")
            for steps, dtypes, shape in pairwise([*STEPS], [*DTYPES], [*shapes])
        ],
    )


@in_pairs({"bias-and-silu": (True, 140, 4), "plain": (False, 16, 3)})
def test_a_convolution(steps: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[Any, ...]) -> None:
    check_conv(steps, *dtypes, *shape)


@in_pairs(
    {
        "shared-keys": ((2, 4), (16, 32), False),
        "odd": ((3, 3), (24, 20), False),
        "by-channel": ((2, 2), (16, 16), True),
    }
)
def test_a_gated_delta_rule(steps: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[Any, ...]) -> None:
    check_delta(steps, *dtypes, *shape)


@in_pairs({"groups": (4, 2, (16, 32), True), "odd": (3, 1, (20, 24), False)})
def test_a_selective_scan_by_heads(
    steps: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[Any, ...]
) -> None:
    check_ssm(steps, *dtypes, *shape)


@in_pairs({"whole": (140, 16, True), "odd": (24, 12, False)})
def test_a_selective_scan(steps: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[Any, ...]) -> None:
    check_scan(steps, *dtypes, *shape)
