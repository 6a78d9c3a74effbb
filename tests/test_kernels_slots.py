"""Kernels of one token through states in slots: what they refuse, and how states are divided."""

from __future__ import annotations

import sys

import pytest
import torch
from kernel_cases import DEVICE, load
from state_step_cases import FP32, SLOTS, InSlots, noise

kernels = load()
tiling = sys.modules[f"{kernels.__name__}.tuning"].state_tiling
ROWS = 6


def test_no_rows() -> None:
    states = noise(SLOTS, 8, 4)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert kernels.conv_step(noise(0, 8), noise(8, 4), None, states, nothing, nothing).shape == (0, 8)


def test_a_row_without_a_past_starts_from_zeros_and_may_write_nowhere() -> None:
    slots = InSlots((2, 4, 8), FP32)
    none = torch.full((1,), -1, device=DEVICE)
    given = noise(1, 2, 4), noise(1, 2, 4, seed=1), noise(1, 2, 8, seed=2), -noise(1, 2).abs(), noise(1, 2)
    query, key, value, _, beta = given
    got = kernels.delta_step(*given, slots.states, none, none)
    wanted = (query * key).sum(-1, keepdim=True) / 2 * value * beta.unsqueeze(-1)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(slots.states.isnan(), slots.before.isnan())


def test_few_states_are_divided_among_more_programs() -> None:
    assert tiling(32 * 256, 128, 128) == (32, 4)
    assert tiling(32, 128, 128) == (16, 4)
    assert tiling(1, 128, 64) == (8, 2)
    assert tiling(1, 16, 4) == (4, 1)


def test_refuses_what_does_not_fit() -> None:
    slots = InSlots((8, 4), FP32)
    x, weight = noise(ROWS, 8), noise(8, 4)
    with pytest.raises(ValueError, match=r"Invalid shape of source: expected \[6\] of torch.int64"):
        kernels.conv_step(x, weight, None, slots.states, slots.source.int(), slots.target)
    with pytest.raises(ValueError, match=r"Invalid shape of states: expected \[slots, 8, 4\]"):
        kernels.conv_step(x, weight, None, slots.states[..., :3], slots.source, slots.target)
    with pytest.raises(ValueError, match=r"Invalid activation 'gelu'"):
        kernels.conv_step(x, weight, None, *slots.given, activation="gelu")
    with pytest.raises(ValueError, match="Invalid shape of weight"):
        kernels.conv_step(x, weight[:4], None, *slots.given)
    with pytest.raises(ValueError, match="Invalid shape of bias"):
        kernels.conv_step(x, weight, noise(4), *slots.given)
    q, v = noise(ROWS, 2, 4), noise(ROWS, 3, 8)
    with pytest.raises(ValueError, match="Invalid shape of query, key or value"):
        kernels.delta_step(q, q, v, noise(ROWS, 3), noise(ROWS, 3), *slots.given)
    with pytest.raises(ValueError, match="Invalid shape of decay or beta"):
        kernels.delta_step(q, q, v[:, :2], noise(ROWS, 2, 3), noise(ROWS, 2), *slots.given)
    with pytest.raises(ValueError, match="Invalid strides of query: the last must be 1"):
        kernels.delta_step(
            noise(ROWS, 4, 2).transpose(1, 2), q, v[:, :2], noise(ROWS, 2), noise(ROWS, 2),
            noise(SLOTS, 2, 4, 8), slots.source, slots.target,
        )  # fmt: skip
    with pytest.raises(ValueError, match="Invalid shape of B or C"):
        kernels.ssm_step(v, noise(ROWS, 3), noise(3), q, q, None, None, *slots.given)
    with pytest.raises(ValueError, match="Invalid shape of dt, A, D or dt_bias"):
        kernels.ssm_step(v, noise(ROWS, 3), noise(2), q[:, :1], q[:, :1], None, None, *slots.given)
    scanned = noise(ROWS, 8), noise(ROWS, 8), noise(8, 4)
    b = noise(ROWS, 4)
    with pytest.raises(ValueError, match="Invalid shape of A, B or C"):
        kernels.scan_step(*scanned, b[:, :2], b, None, None, *slots.given)
    with pytest.raises(ValueError, match="Invalid shape of dt, gate, D or dt_bias"):
        kernels.scan_step(*scanned, b, b, noise(4), None, *slots.given)
