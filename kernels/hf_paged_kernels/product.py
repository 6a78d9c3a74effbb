"""The product of few rows with a weight: as fast as the weight comes through memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch
from .tuning import Strip

DTYPES = (torch.bfloat16, torch.float16)
MOST_ROWS = 64
"""Beyond, libraries do as well."""


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, strip: Strip) -> torch.Tensor:
    """x @ weight.T, and then + bias, summed in fp32 and rounded once.

    x [rows, k], up to 64 rows, the last stride 1; weight [n, k] without gaps; bias [n]; all of one dtype, bfloat16 or float16. The
    answer is [rows, n]. A program takes strip.block_n of the n through all of k.
    """
    if weight.ndim != 2 or not weight.is_contiguous():
        raise ValueError(f"Invalid shape of weight: expected [n, k] without gaps, got {list(weight.shape)}, {weight.stride()}")
    n, k = weight.shape
    if x.ndim != 2 or not 1 <= x.shape[0] <= MOST_ROWS or x.shape[1] != k or x.stride(1) != 1:
        raise ValueError(f"Invalid shape of x: expected [1 to {MOST_ROWS}, {k}] with the last stride 1, got {list(x.shape)}, {x.stride()}")
    if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
        raise ValueError(f"Invalid shape of bias: expected [{n}], got {list(bias.shape)}")
    if x.dtype not in DTYPES or weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(f"Invalid dtypes: x, weight and bias must share bfloat16 or float16, got {x.dtype} and {weight.dtype}")
    rows = x.shape[0]
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if n == 0:
        return out
    launch(
        _product, (triton.cdiv(n, strip.block_n),),
        x, weight, weight if bias is None else bias, out, rows, n, k, x.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=strip.block_n, BLOCK_K=strip.block_k, WHOLE=k % strip.block_k == 0,
        BIAS=bias is not None, UPCAST=x.device.type == "cpu", num_warps=strip.warps, num_stages=strip.stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _product(
    X, WEIGHT, BIAS_OF, OUT, rows, n, k, x_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """OUT[m, j] = sum over i of X[m, i] * WEIGHT[j, i], + BIAS_OF[j] if BIAS; X [rows, k], WEIGHT [n, k], OUT [rows, n].

    WHOLE: k is a multiple of BLOCK_K. UPCAST: for the interpreter, which multiplies no bfloat16.
    """
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Columns beyond the last read it again; they are not stored.
    x = X + row[:, None] * x_row + depth[None, :]
    weight = WEIGHT + tl.minimum(column, n - 1).to(tl.int64)[None, :] * k + depth[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, k, BLOCK_K):
        if WHOLE:
            a = tl.load(x, mask=(row < rows)[:, None], other=0.0)
            b = tl.load(weight, eviction_policy="evict_first")
        else:
            a = tl.load(x, mask=(row < rows)[:, None] & (begin + depth < k)[None, :], other=0.0)
            b = tl.load(weight, mask=(begin + depth < k)[:, None], other=0.0, eviction_policy="evict_first")
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total)
        x += BLOCK_K
        weight += BLOCK_K
    if BIAS:
        total += tl.load(BIAS_OF + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    real = (row < rows)[:, None] & (column < n)[None, :]
    tl.store(OUT + row[:, None] * n + column[None, :], total.to(OUT.dtype.element_ty), mask=real)
