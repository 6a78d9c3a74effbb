"""Kernels of sampling for rows of scores: a token drawn by their softmax, and the log of its denominator."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch

TILE = 4096
"""Scores that are read at once."""


def draw(scores: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """A token [rows], int64, for every row of scores [rows, width], fp32: the first at which the softmax adds
    up to more than at [rows], fp64 in [0, 1).

    Sums are in fp64, in an order that no other row changes. Where a row has NaN, inf or nothing but -inf, the
    token is `width`.
    """
    _require_rows(scores)
    if at.shape != scores.shape[:1] or at.dtype != torch.float64:
        raise ValueError(f"Invalid at: expected float64 [{len(scores)}], got {at.dtype} {list(at.shape)}")
    count, width = scores.shape
    out = torch.empty(count, dtype=torch.int64, device=scores.device)
    if count:
        tiles = triton.next_power_of_2(triton.cdiv(width, TILE))
        launch(
            _draw, (count,), scores, at.contiguous(), out, width, scores.stride(0),
            TILE=TILE, TILES=tiles, num_warps=8,
        )  # fmt: skip
    return out


def logsumexp(scores: torch.Tensor) -> torch.Tensor:
    """The log of the sum of exponentials of each row of scores [rows, width], fp32, as two numbers that add
    up to it: the largest score, and what is between, [2, rows].
    """
    _require_rows(scores)
    count, width = scores.shape
    out = torch.empty(2, count, dtype=torch.float32, device=scores.device)
    if count:
        launch(_logsumexp, (count,), scores, out, count, width, scores.stride(0), TILE=TILE, num_warps=8)
    return out


def _require_rows(scores: torch.Tensor) -> None:
    if scores.ndim != 2 or scores.dtype != torch.float32 or not scores.shape[1] or scores.stride(1) != 1:
        raise ValueError(
            f"Invalid scores: expected float32 [rows, width] with rows in one piece, got {scores.dtype} "
            f"{list(scores.shape)} with strides {list(scores.stride())}"
        )


@triton.jit
def _draw(SCORES, AT, OUT, width, stride, TILE: tl.constexpr, TILES: tl.constexpr):
    """OUT[row] = the first place at which exp(SCORES - their largest) adds up to more than AT of the whole:
    a program for each row. SCORES [rows, width]; AT, OUT [rows]; TILES at least width / TILE.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = SCORES + row * stride
    column = tl.arange(0, TILE)
    top = tl.zeros([TILE], tl.float32) - float("inf")
    for n in range(0, width, TILE):
        top = tl.maximum(top, tl.load(begin + n + column, mask=n + column < width, other=-float("inf")))
    most = tl.max(top, 0)
    which = tl.arange(0, TILES)
    shares = tl.zeros([TILES], tl.float64)
    for n in range(0, width, TILE):
        x = tl.load(begin + n + column, mask=n + column < width, other=-float("inf"))
        own = tl.sum(tl.exp(x - most).to(tl.float64), 0)
        shares = tl.where(which == n // TILE, own, shares)
    total = tl.sum(shares, 0)
    at = tl.load(AT + row) * total
    # Where nothing is added, rounding alone may step over AT: such places are not drawn.
    passed = (tl.cumsum(shares, 0) > at) & (shares > 0)
    last = tl.max(tl.where(shares > 0, which, 0), 0)
    tile = tl.minimum(tl.min(tl.where(passed, which, TILES), 0), last)
    before = tl.sum(tl.where(which < tile, shares, 0.0), 0)
    x = tl.load(begin + tile * TILE + column, mask=tile * TILE + column < width, other=-float("inf"))
    chance = tl.exp(x - most).to(tl.float64)
    passed = (before + tl.cumsum(chance, 0) > at) & (chance > 0)
    last = tl.max(tl.where(chance > 0, column, 0), 0)
    found = tile * TILE + tl.minimum(tl.min(tl.where(passed, column, TILE), 0), last)
    tl.store(OUT + row, tl.where((total > 0) & (total < float("inf")), found, width))


@triton.jit(do_not_specialize=["count"])
def _logsumexp(SCORES, OUT, count, width, stride, TILE: tl.constexpr):
    """OUT[0, row] + OUT[1, row] = log(sum(exp(SCORES[row]))): a program for each row of SCORES [count,
    width], which is read once.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = SCORES + row * stride
    column = tl.arange(0, TILE)
    top = tl.zeros([TILE], tl.float32) - float("inf")
    total = tl.zeros([TILE], tl.float32)
    for n in range(0, width, TILE):
        x = tl.load(begin + n + column, mask=n + column < width, other=-float("inf"))
        larger = tl.maximum(top, x)
        from_here = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(top - from_here) + tl.exp(x - from_here)
        top = larger
    most = tl.max(top, 0)
    most = tl.where(most == -float("inf"), 0.0, most)
    total = tl.sum(total * tl.exp(top - most), 0)
    tl.store(OUT + row, most)
    tl.store(OUT + count + row, tl.log(total))
