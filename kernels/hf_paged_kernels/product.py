"""Products whose order over the depth is one for all shapes: tile after tile from the first number to the
last.

Tensor cores add up 16 halves at a time, in a way of their own; the tiles here are multiples of that, so a
row's bits depend neither on the tile nor on the rows beside it. Floats are multiplied one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launching import launch


class _Tile(NamedTuple):
    """How a launch is cut; no bit depends on it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FLOATS = _Tile(64, 64, 16, 4, 2)
HALVES = [
    (16, _Tile(16, 32, 256, 4, 4)),
    (64, _Tile(64, 32, 256, 4, 4)),
    (128, _Tile(64, 64, 128, 4, 4)),
    (256, _Tile(64, 128, 64, 4, 4)),
    (2**62, _Tile(128, 128, 64, 8, 4)),
]
"""Rows up to, and the tile. Measured on an H200."""
MOST_BATCHES = 65535
"""Of a launch."""


def product(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, ends: torch.Tensor | None = None
) -> torch.Tensor:
    """x [batches, rows, depth] w [batches, depth, columns] + bias [columns], rounded once: [batches, rows,
    columns].

    ends [batches of w], int32: instead, x is [1, rows, depth] and w[i] is for the rows from ends[i - 1] to
    ends[i]; rows behind the last are 0.
    """
    if x.ndim != 3 or w.ndim != 3 or w.shape[1] != x.shape[2] or (ends is None and len(w) != len(x)):
        raise ValueError(
            f"Invalid shape of w: expected [{len(x)}, {x.shape[-1]}, columns], got {list(w.shape)}"
        )
    if w.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(f"Invalid dtype of w or bias: expected {x.dtype}, got {w.dtype}")
    if ends is not None and (len(x) != 1 or ends.shape != (len(w),)):
        raise ValueError(
            f"Invalid shape of ends: expected [{len(w)}] and x [1, rows, depth], got {list(x.shape)}"
        )
    if x.stride(2) != 1:
        x = x.contiguous()
    batches, rows, depth = x.shape
    columns = w.shape[2]
    make = torch.empty if ends is None else torch.zeros
    out = make(batches, rows, columns, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if batches > MOST_BATCHES:
        parts = zip(x.split(MOST_BATCHES), w.split(MOST_BATCHES), out.split(MOST_BATCHES), strict=True)
        for own, weight, answer in parts:
            answer.copy_(product(own, weight, bias))
        return out
    floats = x.dtype == torch.float32
    mean = rows if ends is None else triton.cdiv(rows, len(w))
    tile = FLOATS if floats else next(tile for most, tile in HALVES if mean <= most)
    tiles = triton.cdiv(rows, tile.rows) + (0 if ends is None else len(w))
    launch(
        _product, (tiles * triton.cdiv(columns, tile.columns), batches),
        x, w, x if bias is None else bias, x if ends is None else ends, out, rows, columns, depth, len(w),
        tiles,
        x.stride(0), x.stride(1), w.stride(0), w.stride(1), w.stride(2), out.stride(0), out.stride(1),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, WHOLE=depth % tile.depth == 0,
        HAS_BIAS=bias is not None, GROUPED=ends is not None, PRECISION="ieee" if floats else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "tiles", "groups"])
def _product(
    X, W, BIAS, ENDS, OUT, rows, columns, depth, groups, tiles,
    x_batch, x_row, w_batch, w_depth, w_column, out_batch, out_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr, GROUPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT = X W + BIAS; a program computes ROWS rows and COLUMNS columns, DEPTH numbers of the sums at once.

    X [batches, rows, depth]; W [batches or groups, depth, columns]; BIAS [columns]; ENDS [groups]; OUT
    [batches, rows, columns]. Eight tiles of rows are computed side by side, for they read the same W.
    """
    wide = tl.cdiv(columns, COLUMNS)
    together = 8 * wide
    first = tl.program_id(0) // together * 8
    size = tl.minimum(tiles - first, 8)
    tile = first + tl.program_id(0) % together % size
    column = tl.program_id(0) % together // size * COLUMNS + tl.arange(0, COLUMNS)
    batch = tl.program_id(1).to(tl.int64)
    begin = tile * ROWS
    end = rows
    which = batch
    if GROUPED:
        found = groups
        before = 0
        passed = 0
        for i in range(groups):
            last = tl.load(ENDS + i).to(tl.int32)
            own = tl.cdiv(tl.maximum(last - before, 0), ROWS)
            if (found == groups) & (tile < passed + own):
                found = i
                begin = before + (tile - passed) * ROWS
                end = last
            passed += own
            before = last
        if found == groups:
            return
        which = found.to(tl.int64)
    row = begin + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    x = X + batch * x_batch + (row % rows).to(tl.int64)[:, None] * x_row + k[None, :]
    w = (
        W
        + which * w_batch
        + (column % columns).to(tl.int64)[None, :] * w_column
        + k[:, None].to(tl.int64) * w_depth
    )
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, depth, DEPTH):
        if WHOLE:
            a = tl.load(x)
            b = tl.load(w)
        else:
            a = tl.load(x, mask=(at + k < depth)[None, :], other=0.0)
            b = tl.load(w, mask=(at + k < depth)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        x += DEPTH
        w += DEPTH * w_depth
    if HAS_BIAS:
        total += tl.load(BIAS + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    to = OUT + batch * out_batch + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(to, total.to(OUT.dtype.element_ty), mask=(row < end)[:, None] & (column < columns)[None, :])
