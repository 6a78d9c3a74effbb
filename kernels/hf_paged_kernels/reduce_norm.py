"""A sum over ranks, the residual added to it, and the root-mean-square norm of that, in one launch.

Each rank reads the others' parts where these have written them. Ranks meet once: parts of sums in a row lie
in different places, so that none is overwritten while another rank may still read it.
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
    """(total, rms_norm(total)) with total = residual + (parts[0] + parts[1] + ...), both sums rounded.

    parts: what the ranks add, [..., n] without gaps, n up to 16384, in memory that all reach. pads: int32
    flags of the ranks there, of which each program has one for every rank; all are 0 between launches.
    residual [..., n]; weight [n]. All ranks launch this for the same shape, and get the same bits.
    """
    own, ranks = parts[rank], len(parts)
    n = own.shape[-1]
    lines = own.numel() // n
    alike = all(part.shape == own.shape for part in parts)
    if ranks < 2 or not alike or not own.is_contiguous() or not 1 <= n <= WIDEST:
        raise ValueError(
            f"Invalid shape of parts: expected several of [..., 1 to {WIDEST}] without gaps, got "
            f"{[list(part.shape) for part in parts]}"
        )
    if residual.shape != own.shape or residual.dtype != own.dtype or weight.shape != (n,):
        raise ValueError(
            f"Invalid shape of residual or weight: expected {list(own.shape)} of {own.dtype} and [{n}], got "
            f"{list(residual.shape)} of {residual.dtype} and {list(weight.shape)}"
        )
    programs = min(lines, min(pad.numel() for pad in pads) // ranks)
    if not programs or len(pads) != ranks:
        raise ValueError(
            f"Invalid shape of pads: expected {ranks} of {ranks} flags or more, got {[*map(len, pads)]}"
        )
    residual = residual.contiguous()
    total = torch.empty_like(residual)
    dtype = own.dtype if centered else torch.promote_types(own.dtype, weight.dtype)
    out = torch.empty_like(residual, dtype=dtype)
    padded = triton.next_power_of_2(n)
    launch(
        _reduce_norm, (programs,),
        own, tuple(parts), tuple(pads), residual, weight, total, out, eps, lines,
        RANK=rank, RANKS=ranks, N=n, PADDED=padded, CENTERED=centered,
        num_warps=min(16, max(1, padded // 256)),
    )  # fmt: skip
    return total, out


@triton.jit(do_not_specialize=["eps", "lines"])
def _reduce_norm(
    PART, PARTS, PADS, RESIDUAL, WEIGHT, TOTAL, OUT, eps, lines,
    RANK: tl.constexpr, RANKS: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """TOTAL = round(RESIDUAL + round(the sum of PARTS, in their order)), OUT as `norm` has it.

    A program puts a 1 into its flag in every other rank's pad, which says that PART is there, and takes the
    others' out of its own. It takes every so many-th line: the same on all ranks.
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
            for rank in tl.static_range(RANKS):
                if rank != RANK:
                    while (
                        tl.atomic_cas(PADS[rank] + RANKS * first + RANK, 0, 1, sem="release", scope="sys")
                        != 0
                    ):
                        pass
            for rank in tl.static_range(RANKS):
                if rank != RANK:
                    while (
                        tl.atomic_cas(PADS[RANK] + RANKS * first + rank, 1, 0, sem="acquire", scope="sys")
                        != 1
                    ):
                        pass
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                each = part
            else:
                each = tl.load(PARTS[rank] + at, mask=real, other=0.0, volatile=True)
            if rank == 0:
                summed = each.to(tl.float32)
            else:
                summed += each.to(tl.float32)
        total = (residual + summed.to(part.dtype).to(tl.float32)).to(part.dtype)
        tl.store(TOTAL + at, total, mask=real)
        h = total.to(tl.float32)
        h = h * tl.rsqrt(tl.sum(h * h, 0) * (1.0 / N) + eps)
        if CENTERED:
            y = h * (1.0 + weight)
        else:
            y = weight * h.to(part.dtype).to(tl.float32)
        tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=real)
