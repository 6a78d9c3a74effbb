"""Counter-based random numbers: a draw is a function of a seed and a position, independent of the rest of the
batch (C35).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...kv.reference import invariant

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64
BITS = 48


def uniform(*keys: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) in fp64, one for each place of the keys, int64 tensors that broadcast. Equal keys,
    equal numbers, on any device.
    """
    state = torch.zeros((), dtype=torch.int64, device=keys[0].device)
    for key in keys:
        state = _mix(state + (key + 1) * GOLDEN)
    return _shift(state, 64 - BITS).double() * 2.0**-BITS


def row_states(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """States of rows [rows] for `row_numbers`, each with a seed and the number of a sample: the same in every
    step.
    """
    return _stirred(_stirred(np.zeros(len(seeds), np.uint64), seeds), indices)


def row_numbers(states: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    """The numbers [rows] of `uniform(seeds, indices, positions)`, made by the host: to a device every
    operation would be given by itself.
    """
    bits: np.ndarray = _stirred(states, positions) >> np.uint64(64 - BITS)
    return bits * 2.0**-BITS


def _stirred(state: np.ndarray, keys: Sequence[int]) -> np.ndarray:
    """The next state [rows], on the host."""
    x = state + (np.array(keys, np.int64).view(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST % 2**64)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND % 2**64)
    stirred: np.ndarray = x ^ (x >> np.uint64(31))
    return stirred


def gumbel(*keys: torch.Tensor) -> torch.Tensor:
    """Noise in fp64 that makes the largest of log weights + noise a draw by weight, the next largest the next
    without putting back.
    """
    with invariant.left():
        return -(-(uniform(*keys) + 2.0 ** -(BITS + 1)).log()).log()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Let every bit of x change every bit of the answer (the finalizer of splitmix64)."""
    x = (x ^ _shift(x, 30)) * FIRST
    x = (x ^ _shift(x, 27)) * SECOND
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right as if there were no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
