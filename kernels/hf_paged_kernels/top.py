"""The largest numbers of short lines, as routers ask for them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import exact
from .launching import launch

WIDEST = 1024
"""The longest line."""
MOST = 32
"""The most numbers of a line."""


def top(x: torch.Tensor, count: int, *, softmax: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest numbers of every line of x [lines, n], the largest first, and their places, int64.

    NaN is the largest, as torch has it. Of equal numbers that with the lower place comes first. softmax: the
    numbers are the softmax of the line, in fp32.
    """
    if x.ndim != 2 or not 0 < x.shape[1] <= WIDEST or not 0 < count <= min(MOST, x.shape[1]):
        raise ValueError(
            f"Invalid shape of x: expected [lines, n] with {count} <= n <= {WIDEST} and at most {MOST} "
            f"numbers of a line, got {list(x.shape)}"
        )
    lines, n = x.shape
    dtype = torch.float32 if softmax else x.dtype
    values = torch.empty(lines, count, dtype=dtype, device=x.device)
    places = torch.empty(lines, count, dtype=torch.long, device=x.device)
    if lines:
        launch(
            _top, (lines,), x, values, places, x.stride(0), x.stride(1),
            N=n, COUNT=count, BLOCK=triton.next_power_of_2(n), SOFTMAX=softmax, EXACT=x.device.type != "cpu",
            num_warps=1 if n <= 256 else 4,
        )  # fmt: skip
    return values, places


@triton.jit
def _top(
    X, VALUES, PLACES, x_line, x_place,
    N: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, SOFTMAX: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """VALUES and PLACES [lines, COUNT] of X [lines, N]; a program takes a line.

    Bits of floats are compared as integers of the same order. What was taken, or is not in the line, is less
    than any number.
    """
    line = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x = tl.load(X + line * x_line + place * x_place, mask=place < N, other=0.0)
    number = x.to(tl.float32)
    if SOFTMAX:
        most = tl.max(tl.where(place < N, number, float("-inf")), 0)
        raised = tl.where(place < N, exact.exp(number - most, EXACT), 0.0)
        number = tl.div_rn(raised, tl.zeros([BLOCK], tl.float32) + tl.sum(raised, 0))
    bits = number.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(number != number, 0x7FFFFFFF, key)
    key = tl.where(place < N, key, -0x80000000)
    for i in tl.static_range(COUNT):
        best = tl.argmax(key, 0)
        found = tl.sum(tl.where(place == best, number, 0.0), 0)
        tl.store(VALUES + line * COUNT + i, found.to(VALUES.dtype.element_ty))
        tl.store(PLACES + line * COUNT + i, best.to(tl.int64))
        key = tl.where(place == best, -0x80000000, key)
