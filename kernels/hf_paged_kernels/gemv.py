"""Products of one to eight rows: a step of so few rows takes what reading the weights takes.

Every program reads whole lines of a weight. On Hopper and later a launch begins while the kernel before it
runs: programs wait for the rows, those of one row after they have asked for their first weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from .launching import early, launch

MOST_ROWS = 8
MOST_WEIGHTS = 3


class _Tile(NamedTuple):
    """How a launch is cut: columns of the answer and depth that a program takes at once."""

    columns: int
    depth: int
    warps: int
    stages: int


ONE = _Tile(2, 2048, 8, 1)
SEVERAL = _Tile(16, 256, 2, 5)
"""Measured on an H100."""


def gemv(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """x [rows, depth] times each of one to three weights [n_i, depth], plus biases [n_i], rounded once:
    [rows, sum of n_i].

    One to eight rows of halves; the last stride of x and of weights is 1. Weights must be there before the
    kernel that is launched before this one: on Hopper and later they are read while it runs.
    """
    rows, depth = x.shape
    if not 1 <= rows <= MOST_ROWS or x.stride(1) != 1 or x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"Invalid x: expected 1 to {MOST_ROWS} rows of float16 or bfloat16 with the last stride 1, got "
            f"{list(x.shape)} of {x.dtype}, strides {x.stride()}"
        )
    given = [*weights, *(biases or [])]
    if not 1 <= len(weights) <= MOST_WEIGHTS or (biases and len(biases) != len(weights)):
        raise ValueError(
            f"Invalid weights or biases: expected 1 to {MOST_WEIGHTS} weights and as many biases or none, "
            f"got {len(weights)} and {len(biases or [])}"
        )
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != depth or weight.stride(1) != 1:
            raise ValueError(
                f"Invalid shape of a weight: expected [n, {depth}] with the last stride 1, got "
                f"{list(weight.shape)}, strides {weight.stride()}"
            )
    if any(each.dtype != x.dtype for each in given):
        raise ValueError(
            f"Invalid dtype of weights or biases: expected {x.dtype}, got {[each.dtype for each in given]}"
        )
    for weight, bias in zip(weights, biases or [], strict=False):
        if bias.shape != weight.shape[:1] or not bias.is_contiguous():
            raise ValueError(
                f"Invalid shape of a bias: expected [{len(weight)}] without gaps, got {list(bias.shape)}"
            )
    sizes = [len(weight) for weight in weights]
    out = torch.empty(rows, sum(sizes), dtype=x.dtype, device=x.device)
    tile = ONE if rows == 1 else SEVERAL
    missing = MOST_WEIGHTS - len(weights)
    weights = [*weights, *[weights[0]] * missing]
    biases = [*biases, *[biases[0]] * missing] if biases else [x] * MOST_WEIGHTS
    sizes = [*sizes, *[0] * missing]
    tiles = [triton.cdiv(size, tile.columns) for size in sizes]
    launch(
        _gemv, (sum(tiles),),
        x, *weights, *biases, out, depth, rows, *sizes, x.stride(0), *(each.stride(0) for each in weights),
        COLUMNS=tile.columns, DEPTH=tile.depth, WHOLE=depth % tile.depth == 0,
        ROWS=1 if rows == 1 else MOST_ROWS, HAS_BIAS=biases[0] is not x, STAGES=tile.stages,
        num_warps=tile.warps, **early(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "size0", "size1", "size2"])
def _gemv(
    X, W0, W1, W2, BIAS0, BIAS1, BIAS2, OUT, depth, rows, size0, size1, size2, x_row, w0_row, w1_row, w2_row,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """OUT = cat(X W0 + BIAS0, X W1 + BIAS1, X W2 + BIAS2); a program computes COLUMNS columns of one of them
    for all rows.

    X [rows, depth]; Wi [sizei, depth]; BIASi [sizei]; OUT [rows, size0 + size1 + size2].
    """
    tile = tl.program_id(0)
    tiles0 = tl.cdiv(size0, COLUMNS)
    tiles1 = tl.cdiv(size1, COLUMNS)
    weights = W0
    bias = BIAS0
    size = size0
    w_row = w0_row
    before = 0
    if tile >= tiles0 + tiles1:
        weights = W2
        bias = BIAS2
        size = size2
        w_row = w2_row
        before = size0 + size1
        tile -= tiles0 + tiles1
    elif tile >= tiles0:
        weights = W1
        bias = BIAS1
        size = size1
        w_row = w1_row
        before = size0
        tile -= tiles0
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    real = column < size
    k = tl.arange(0, DEPTH)
    lines = weights + tl.minimum(column, size - 1).to(tl.int64)[:, None] * w_row
    if ROWS == 1:
        first = _load(lines, k, depth, WHOLE)
        if EARLY:
            cuda.gdc_wait()
        total = first.to(tl.float32) * _load(X, k, depth, WHOLE).to(tl.float32)[None, :]
        for at in tl.range(DEPTH, depth, DEPTH, num_stages=STAGES):
            w = _load(lines, at + k, depth, WHOLE)
            total += w.to(tl.float32) * _load(X, at + k, depth, WHOLE).to(tl.float32)[None, :]
        if EARLY:
            cuda.gdc_launch_dependents()
        y = tl.sum(total, 1)
        if HAS_BIAS:
            y += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
        tl.store(OUT + before + column, y.to(OUT.dtype.element_ty), mask=real)
    else:
        if EARLY:
            cuda.gdc_wait()
        row = tl.arange(0, ROWS)
        x = X + tl.minimum(row, rows - 1)[None, :] * x_row
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        for at in tl.range(0, depth, DEPTH, num_stages=STAGES):
            w = _load(lines, at + k, depth, WHOLE)
            if WHOLE:
                a = tl.load(x + (at + k)[:, None])
            else:
                a = tl.load(x + (at + k)[:, None], mask=(at + k < depth)[:, None], other=0.0)
            sums = tl.dot(w, a, sums)
        if EARLY:
            cuda.gdc_launch_dependents()
        if HAS_BIAS:
            sums += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[:, None]
        width = size0 + size1 + size2
        to = OUT + row.to(tl.int64)[None, :] * width + (before + column)[:, None]
        tl.store(to, sums.to(OUT.dtype.element_ty), mask=real[:, None] & (row < rows)[None, :])


@triton.jit
def _load(lines, k, depth, WHOLE: tl.constexpr):
    """lines[..., k], whose numbers behind depth are 0."""
    at = lines + k if len(lines.shape) < 2 else lines + k[None, :]
    if WHOLE:
        return tl.load(at)
    mask = k < depth if len(lines.shape) < 2 else (k < depth)[None, :]
    return tl.load(at, mask=mask, other=0.0)
