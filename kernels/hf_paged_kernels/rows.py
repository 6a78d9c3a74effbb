"""Sums, softmaxes and functions of numbers whose bits depend on the row alone, or on the number alone."""

# ruff: noqa: SIM108 - a branch on a constant must stay a plain if: Triton compiles the other side away
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from . import exact
from .launching import launch

ROWS = ("sum", "softmax", "log_softmax", "logsumexp", "mean", "cumsum")
MAPS = (
    "exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "erf", "softplus", "pow",
    "expm1", "log1p",
)  # fmt: skip
TILE = 4096
"""Numbers of a row that are read at once."""
_SUM, _SOFTMAX, _LOG_SOFTMAX, _LOGSUMEXP = (tl.constexpr(i) for i in range(4))
_SHARES = tl.constexpr(float(2**40))


def rows(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Of each row of x [rows, width], fp32: its sum, mean or logsumexp [rows]; its softmax, log_softmax or
    running sums [rows, width].

    Sums are taken in fixed point relative to the largest number of the row, so zeros between the others, or
    -inf for the exponentials, change no bit.
    """
    if kind not in ROWS:
        raise ValueError(f"Invalid kind {kind!r}: expected one of {', '.join(ROWS)}")
    if x.ndim != 2 or not (x.dtype == torch.float32 or (kind == "cumsum" and x.dtype == torch.float64)):
        raise ValueError(f"Invalid x: expected [rows, width] in float32, got {list(x.shape)} in {x.dtype}")
    x = x.contiguous()
    count, width = x.shape
    whole = kind in ("softmax", "log_softmax", "cumsum")
    out = torch.empty_like(x) if whole else x.new_empty(count)
    if out.numel() == 0:
        return out
    padded = triton.next_power_of_2(width)
    if kind == "cumsum":
        tile = min(padded, 1024)
        launch(_running, (count,), x, out, width, TILE=tile, num_warps=4, enable_fp_fusion=False)
        return out
    tile = min(padded, TILE)
    at_once = max(1, 1024 // tile)
    launch(
        _rows, (triton.cdiv(count, at_once),),
        x, out, count, width,
        1.0 / max(1, width) if kind == "mean" else 1.0,
        KIND=0 if kind == "mean" else ROWS.index(kind), TILE=tile, LOG2_WIDTH=padded.bit_length() - 1,
        AT_ONCE=at_once, EXACT=x.is_cuda or x.is_meta, num_warps=max(4, tile // 512), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def mapped(kind: str, x: torch.Tensor, parameter: float = 0.0) -> torch.Tensor:
    """A function of every number of x, computed in fp32 and rounded to x's dtype; parameter: the exponent of
    "pow".
    """
    if kind not in MAPS:
        raise ValueError(f"Invalid kind {kind!r}: expected one of {', '.join(MAPS)}")
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        tile = 1024
        launch(
            _mapped, (triton.cdiv(x.numel(), tile),), x, out, x.numel(), float(parameter),
            KIND=MAPS.index(kind), TILE=tile, EXACT=x.is_cuda or x.is_meta, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count", "factor"])
def _rows(
    X, OUT, count, width, factor,
    KIND: tl.constexpr, TILE: tl.constexpr, LOG2_WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """A program takes AT_ONCE rows of X [count, width], TILE numbers at a time."""
    row = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    here = row < count
    column = tl.arange(0, TILE)[None, :]
    begin = X + row.to(tl.int64)[:, None] * width
    # Tiles are added number by number, and each row's once at the end.
    wide = tl.zeros([AT_ONCE, TILE], tl.float32)
    if KIND == _SUM:
        size = wide
        plain = wide
        for n in range(0, width, TILE):
            x = tl.load(begin + n + column, mask=here[:, None] & (n + column < width), other=0.0)
            size = tl.maximum(size, tl.abs(x))
            plain += x
        top = tl.max(size, 1)
        shift = exact.fixed_shift(top, LOG2_WIDTH)
        total = tl.zeros([AT_ONCE, TILE], tl.int64)
        for n in range(0, width, TILE):
            x = tl.load(begin + n + column, mask=here[:, None] & (n + column < width), other=0.0)
            total += exact.to_fixed(x, shift)
        known = tl.sum(plain, 1)
        fine = (top < float("inf")) & (known == known)
        answer = tl.where(fine, exact.from_fixed(tl.sum(total, 1), shift), known) * factor
        tl.store(OUT + row, answer, mask=here)
    else:
        size = wide - float("inf")
        bad = wide
        for n in range(0, width, TILE):
            x = tl.load(begin + n + column, mask=here[:, None] & (n + column < width), other=-float("inf"))
            size = tl.maximum(size, x)
            bad += tl.where(x != x, x, 0.0)
        top = tl.max(size, 1)
        top = tl.where(top == -float("inf"), 0.0, top)
        shares = tl.zeros([AT_ONCE, TILE], tl.int64)
        for n in range(0, width, TILE):
            x = tl.load(begin + n + column, mask=here[:, None] & (n + column < width), other=-float("inf"))
            shares += (exact.exp(x - top[:, None], EXACT) * _SHARES).to(tl.int64)
        # NaN, and infinity less infinity, end as NaN.
        total = tl.sum(shares, 1).to(tl.float32) * (1.0 / _SHARES) + tl.sum(bad, 1) + (top - top)
        log = top + exact.log(total, EXACT)
        if KIND == _LOGSUMEXP:
            tl.store(OUT + row, log, mask=here)
        else:
            to = OUT + row.to(tl.int64)[:, None] * width
            for n in range(0, width, TILE):
                seen = here[:, None] & (n + column < width)
                x = tl.load(begin + n + column, mask=seen, other=-float("inf"))
                if KIND == _SOFTMAX:
                    y = tl.div_rn(exact.exp(x - top[:, None], EXACT), total[:, None] + wide)
                else:
                    y = x - log[:, None]
                tl.store(to + n + column, y, mask=seen)


@triton.jit
def _running(X, OUT, width, TILE: tl.constexpr):
    """Running sums of one row of X [rows, width], TILE numbers at a time."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, TILE)
    before = tl.zeros([TILE], OUT.dtype.element_ty)
    for n in range(0, width, TILE):
        x = tl.load(X + row + n + column, mask=n + column < width, other=0.0)
        so_far = before + tl.cumsum(x, 0)
        tl.store(OUT + row + n + column, so_far, mask=n + column < width)
        before = tl.zeros([TILE], OUT.dtype.element_ty) + tl.sum(tl.where(column == TILE - 1, so_far, 0.0), 0)


@triton.jit(do_not_specialize=["count", "parameter"])
def _mapped(X, OUT, count, parameter, KIND: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr):
    """OUT = MAPS[KIND](X), both [count]; a program takes TILE numbers."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(X + at, mask=at < count, other=1.0).to(tl.float32)
    if KIND == 0:
        y = exact.exp(x, EXACT)
    elif KIND == 1:
        y = exact.log(x, EXACT)
    elif KIND == 2:
        if EXACT:
            y = libdevice.sin(x)
        else:
            y = tl.sin(x)
    elif KIND == 3:
        if EXACT:
            y = libdevice.cos(x)
        else:
            y = tl.cos(x)
    elif KIND == 4:
        y = exact.tanh(x, EXACT)
    elif KIND == 5:
        y = tl.div_rn(tl.full([TILE], 1.0, tl.float32), 1.0 + exact.exp(-x, EXACT))
    elif KIND == 6:
        y = exact.silu(x, EXACT)
    elif KIND == 7:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 8:
        y = exact.gelu_tanh(x, EXACT)
    elif KIND == 9:
        y = tl.erf(x)
    elif KIND == 10:
        y = exact.softplus(x, EXACT)
    elif KIND == 11:
        if EXACT:
            y = libdevice.pow(x, parameter)
        else:
            y = tl.exp(tl.log(x) * parameter)
    elif KIND == 12:
        if EXACT:
            y = libdevice.expm1(x)
        else:
            y = tl.exp(x) - 1.0
    else:
        if EXACT:
            y = libdevice.log1p(x)
        else:
            y = tl.log(1.0 + x)
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=at < count)
