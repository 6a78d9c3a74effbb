"""Root-mean-square norms rounded as transformers rounds them, alone or with the residual added before."""

# ruff: noqa: SIM108 - a branch on a constant must stay a plain if: Triton compiles the other side away
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import exact
from .launching import early, follow, launch

WIDEST = 16384
TILE = 1024


class Lines(NamedTuple):
    """The leading dimensions of tensors of one shape [..., n], as outer x inner lines of n."""

    count: int
    inner: int
    strides: list[int]
    """Two a tensor, in elements: from one outer index to the next, and from one inner index to the next."""

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> Lines | None:
        """In the order in which the first of them lies in memory; None if two distances do not say it."""
        first = tensors[0]
        dims: list[list[int]] = []
        for d in sorted(
            (d for d in range(first.ndim - 1) if first.shape[d] != 1), key=lambda d: -first.stride(d)
        ):
            size = first.shape[d]
            strides = [x.stride(d) for x in tensors]
            if dims and dims[-1][1:] == [size * stride for stride in strides]:
                dims[-1] = [dims[-1][0] * size, *strides]
            else:
                dims.append([size, *strides])
        if len(dims) > 2:
            return None
        (outer, *far), (inner, *near) = [[1] + [0] * len(tensors)] * (2 - len(dims)) + dims
        return cls(outer * inner, inner, [stride for pair in zip(far, near, strict=True) for stride in pair])


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    centered: bool = False,
    invariant: bool = False,
) -> torch.Tensor:
    """weight * (h * rsqrt(mean(h^2) + eps)).to(x.dtype) with h = x.float(); centered: (h * rsqrt(...) * (1 +
    weight)).to(x.dtype).

    x [..., n] with the last stride 1 and n up to 16384; weight [n]. The answer lies in memory in the order of
    x and has x's dtype or, if not centered, the one that torch promotes it and weight's to. `out` of that
    shape and dtype may be x itself. invariant: with the bits of these operations one by one, the sum in fixed
    point as `rows` has it.
    """
    _check(x, weight)
    dtype = x.dtype if centered else torch.promote_types(x.dtype, weight.dtype)
    if Lines.of(x) is None:
        x = x.contiguous()
    if out is None:
        out = _like(x, dtype)
    if out.shape != x.shape or out.dtype != dtype:
        raise ValueError(
            f"Invalid shape of out: expected {list(x.shape)} of {dtype}, got {list(out.shape)} of {out.dtype}"
        )
    _launch(x, None, weight, None, out, eps, centered, invariant)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    centered: bool = False,
    invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, rms_norm(total)) with total = residual + x, rounded to their dtype before the norm reads it.

    x and residual [..., n] with the last stride 1 and n up to 16384; weight [n]. Both answers have x's shape.
    """
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(-1) != 1:
        raise ValueError(
            f"Invalid shape of residual: expected {list(x.shape)} of {x.dtype}, got {list(residual.shape)} "
            f"of {residual.dtype}"
        )
    if Lines.of(x, residual) is None:
        x = x.contiguous()
        residual = residual.contiguous()
    total = _like(x, x.dtype)
    out = _like(x, x.dtype if centered else torch.promote_types(x.dtype, weight.dtype))
    _launch(x, residual, weight, total, out, eps, centered, invariant)
    return total, out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.ndim == 0 or not 1 <= x.shape[-1] <= WIDEST or x.stride(-1) != 1:
        raise ValueError(
            f"Invalid shape of x: expected [..., 1 to {WIDEST}] with the last stride 1, got {list(x.shape)}, "
            f"{x.stride()}"
        )
    if weight.shape != x.shape[-1:] or weight.stride(0) != 1:
        raise ValueError(f"Invalid shape of weight: expected [{x.shape[-1]}], got {list(weight.shape)}")


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of x's shape that lies without gaps, in x's order as far as torch keeps it."""
    out = torch.empty_like(x, dtype=dtype)
    return out if out.stride(-1) == 1 else torch.empty(x.shape, dtype=dtype, device=x.device)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    centered: bool,
    invariant: bool,
) -> None:
    """One program for TILE elements or one line, whichever is more."""
    add = residual is not None
    found = Lines.of(x, residual, total, out) if add else Lines.of(x, x, x, out)
    if found is None or out.stride(-1) != 1:
        raise ValueError(f"Invalid strides of out: {out.stride()} do not go with those of x, {x.stride()}")
    if found.count == 0:
        return
    n = x.shape[-1]
    padded = triton.next_power_of_2(n)
    at_once = max(1, TILE // padded)
    launch(
        _norm, (triton.cdiv(found.count, at_once),),
        x, residual if add else x, weight, total if add else out, out, eps, found.count, found.inner,
        *found.strides,
        N=n, PADDED=padded, AT_ONCE=at_once, ADD=add, CENTERED=centered, INVARIANT=invariant,
        LOG2=padded.bit_length() - 1, num_warps=min(16, at_once * padded // 256),
        enable_fp_fusion=not invariant, **early(x.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["eps", "count", "inner"])
def _norm(
    X, RESIDUAL, WEIGHT, TOTAL, OUT, eps, count, inner,
    x_outer, x_inner, residual_outer, residual_inner, total_outer, total_inner, out_outer, out_inner,
    N: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr, ADD: tl.constexpr, CENTERED: tl.constexpr,
    INVARIANT: tl.constexpr, LOG2: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """OUT = WEIGHT * round(h * rsqrt(mean(h^2) + eps)), or round(h * rsqrt(mean(h^2) + eps) * (1 + WEIGHT))
    if CENTERED.

    h = X, or TOTAL = round(RESIDUAL + X) if ADD. X, RESIDUAL, TOTAL, OUT [outer, inner, N]; WEIGHT [N]. A
    program takes AT_ONCE of the outer * inner = count lines.
    """
    follow(EARLY)
    line = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = tl.arange(0, PADDED)
    real = (line < count)[:, None] & (column < N)[None, :]
    far = (line // inner).to(tl.int64)
    near = (line % inner).to(tl.int64)
    x = tl.load(X + (far * x_outer + near * x_inner)[:, None] + column[None, :], mask=real, other=0.0)
    weight = tl.load(WEIGHT + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    h = x.to(tl.float32)
    if ADD:
        at = (far * residual_outer + near * residual_inner)[:, None] + column[None, :]
        h = (tl.load(RESIDUAL + at, mask=real, other=0.0).to(tl.float32) + h).to(x.dtype)
        tl.store(TOTAL + (far * total_outer + near * total_inner)[:, None] + column[None, :], h, mask=real)
        h = h.to(tl.float32)
    if INVARIANT:
        squares = exact.fixed_sum(h * h, LOG2)
    else:
        squares = tl.sum(h * h, 1)
    h = h * tl.rsqrt(squares * (1.0 / N) + eps)[:, None]
    if CENTERED:
        y = h * (1.0 + weight)
    else:
        y = weight * h.to(x.dtype).to(tl.float32)
    to = OUT + (far * out_outer + near * out_inner)[:, None] + column[None, :]
    tl.store(to, y.to(OUT.dtype.element_ty), mask=real)
