"""A sum over two ranks, the residual added to it, and the root-mean-square norm of that, in one launch.

Each rank reads the other's part where the other has written it. Ranks meet once: parts of sums in a row lie
in different places, so that none is overwritten while the other rank may still read it.
"""

# ruff: noqa: SIM108 - a branch on a constant must stay a plain if: Triton compiles the other side away
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .launching import launch
from .norm import WIDEST


def reduce_add_rms_norm(
    parts: Sequence[torch.Tensor],
    pads: Sequence[torch.Tensor],
    rank: int,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, rms_norm(total)) with total = residual + (parts[0] + parts[1]), each sum rounded.

    parts: what the ranks add, [..., n] without gaps, n up to 16384, in memory that both reach. pads: int32
    flags of the ranks there, of which each program has two; all are 0 between launches. residual [..., n];
    weight [n]. Both ranks launch this for the same shape, and get the same bits.
    """
    own, other = parts[rank], parts[1 - rank]
    n = own.shape[-1]
    lines = own.numel() // n
    if len(parts) != 2 or own.shape != other.shape or not own.is_contiguous() or not 1 <= n <= WIDEST:
        raise ValueError(
            f"Invalid shape of parts: expected two of [..., 1 to {WIDEST}] without gaps, got "
            f"{[list(part.shape) for part in parts]}"
        )
    if residual.shape != own.shape or residual.dtype != own.dtype or weight.shape != (n,):
        raise ValueError(
            f"Invalid shape of residual or weight: expected {list(own.shape)} of {own.dtype} and [{n}], got "
            f"{list(residual.shape)} of {residual.dtype} and {list(weight.shape)}"
        )
    programs = min(lines, min(pad.numel() for pad in pads) // 2)
    if not programs:
        raise ValueError(f"Invalid shape of pads: expected two flags or more, got {[*map(len, pads)]}")
    residual = residual.contiguous()
    total = torch.empty_like(residual)
    dtype = own.dtype if centered else torch.promote_types(own.dtype, weight.dtype)
    out = torch.empty_like(residual, dtype=dtype)
    padded = triton.next_power_of_2(n)
    launch(
        _reduce_norm, (programs,),
        own, other, pads[rank], pads[1 - rank], residual, weight, total, out, eps, lines,
        RANK=rank, N=n, PADDED=padded, CENTERED=centered, num_warps=min(16, max(1, padded // 256)),
    )  # fmt: skip
    return total, out


@triton.jit(do_not_specialize=["eps", "lines"])
def _reduce_norm(
    PART, OTHER, PAD, OTHER_PAD, RESIDUAL, WEIGHT, TOTAL, OUT, eps, lines,
    RANK: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """TOTAL = round(RESIDUAL + round(PART + OTHER)), OUT as `norm` has it.

    A program puts a 1 into its flag in OTHER_PAD, which says that PART is there, and takes the other's 1 out
    of PAD. It takes every so many-th line: the same on both ranks.
    """
    column = tl.arange(0, PADDED)
    real = column < N
    weight = tl.load(WEIGHT + column, mask=real, other=0.0).to(tl.float32)
    first = tl.program_id(0)
    for line in range(first, lines, tl.num_programs(0)):
        at = line * N + column
        part = tl.load(PART + at, mask=real, other=0.0)
        residual = tl.load(RESIDUAL + at, mask=real, other=0.0).to(tl.float32)
        if line == first:
            while tl.atomic_cas(OTHER_PAD + 2 * first + RANK, 0, 1, sem="release", scope="sys") != 0:
                pass
            while tl.atomic_cas(PAD + 2 * first + 1 - RANK, 1, 0, sem="acquire", scope="sys") != 1:
                pass
        other = tl.load(OTHER + at, mask=real, other=0.0, volatile=True)
        both = (part.to(tl.float32) + other.to(tl.float32)).to(part.dtype).to(tl.float32)
        total = (residual + both).to(part.dtype)
        tl.store(TOTAL + at, total, mask=real)
        h = total.to(tl.float32)
        h = h * tl.rsqrt(tl.sum(h * h, 0) * (1.0 / N) + eps)
        if CENTERED:
            y = h * (1.0 + weight)
        else:
            y = weight * h.to(part.dtype).to(tl.float32)
        tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=real)
