"""A sum over ranks, the residual added to it, and the root-mean-square norm of that, in one launch.

Ranks write numbers into the others' memory and wait until theirs have come into their own. What has not come
is known by its bits, so no flag follows the numbers: a sum takes the time of one write over the link, or two.
"""

# ruff: noqa: SIM108 - a branch on a constant must stay a plain if: Triton compiles the other side away
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .launching import launch
from .norm import WIDEST

PROGRAMS = 128
"""Of a launch, at most. Each waits for those of its number on other ranks."""
BITS = {2: torch.int16, 4: torch.int32}
"""The integers in which numbers of so many bytes are sent."""


def reduce_add_rms_norm(
    part: torch.Tensor,
    inboxes: Sequence[torch.Tensor],
    rank: int,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    centered: bool = False,
    shots: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, rms_norm(total)) with total = residual + (the parts of ranks 0, 1, ...), both sums rounded.

    part: what this rank adds, [..., n] without gaps, n up to 16384, of 2 or 4 bytes a number. inboxes: of
    each rank, in memory that all reach, [ranks, room] numbers of the same dtype, room >= part.numel(): row i
    takes what rank i sends. All bytes there are 255 between launches. Launches in a row take two sets of
    inboxes in turns: a rank may be one launch ahead of another. residual [..., n]; weight [n].

    shots: 1 sends every part to all ranks; 2 sends a line of them to one rank, which sends the total to all:
    fewer bytes, but twice the way. All ranks launch this for the same shape, and get the same bits.
    """
    ranks, n = len(inboxes), part.shape[-1]
    lines = part.numel() // n
    if not part.is_contiguous() or not 1 <= n <= WIDEST or part.element_size() not in BITS:
        raise ValueError(
            f"Invalid part: expected [..., 1 to {WIDEST}] without gaps of 2 or 4 bytes a number, got "
            f"{list(part.shape)} of {part.dtype}"
        )
    if residual.shape != part.shape or residual.dtype != part.dtype or weight.shape != (n,):
        raise ValueError(
            f"Invalid shape of residual or weight: expected {list(part.shape)} of {part.dtype} and [{n}], "
            f"got {list(residual.shape)} of {residual.dtype} and {list(weight.shape)}"
        )
    kinds = [(list(each.shape), each.dtype, each.is_contiguous()) for each in inboxes]
    room = inboxes[rank].shape[-1]
    if ranks < 2 or room < lines * n or kinds != [([ranks, room], part.dtype, True)] * ranks:
        raise ValueError(
            f"Invalid inboxes: expected several, each of [ranks, {lines * n} or more] without gaps, of "
            f"{part.dtype}, got (shape, dtype, no gaps) {kinds}"
        )
    residual = residual.contiguous()
    total = torch.empty_like(residual)
    dtype = part.dtype if centered else torch.promote_types(part.dtype, weight.dtype)
    out = torch.empty_like(residual, dtype=dtype)
    padded = max(32, triton.next_power_of_2(n))  # a number for each thread of a warp: they wait together
    bits = BITS[part.element_size()]
    launch(
        _reduce_norm, (min(lines, PROGRAMS),),
        part.view(bits), tuple(each.view(bits) for each in inboxes), residual, weight, total.view(bits), out,
        eps, lines, room,
        RANK=rank, RANKS=ranks, N=n, PADDED=padded, CENTERED=centered, SHOTS=shots, NAN=torch.iinfo(bits).max,
        num_warps=min(16, max(1, padded // 256)),
    )  # fmt: skip
    return total, out


@triton.jit(do_not_specialize=["eps", "lines"])
def _reduce_norm(
    PART, INBOXES, RESIDUAL, WEIGHT, TOTAL, OUT, eps, lines, room,
    RANK: tl.constexpr, RANKS: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, CENTERED: tl.constexpr,
    SHOTS: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    """TOTAL = round(RESIDUAL + round(the sum of all parts, in the order of ranks)), OUT as `norm` has it.

    Numbers travel as their bits. Those with all bits set, a NaN that no device computes, stand for what has
    not come: NAN, another, is sent for it. A program takes every so many-th line: the same on all ranks.
    """
    column = tl.arange(0, PADDED)
    real = column < N
    first = tl.program_id(0)
    step = tl.num_programs(0)
    inbox = INBOXES[RANK]
    for line in range(first, lines, step):
        at = line * N + column
        bits = tl.load(PART + at, mask=real, other=0)
        bits = _sendable(bits, NAN)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                here = real if SHOTS == 1 else real & (_adds(line, step, RANKS) == rank)
                tl.store(INBOXES[rank] + RANK * room + at, bits, mask=here, cache_modifier=".wt")
    weight = tl.load(WEIGHT + column, mask=real, other=0.0).to(tl.float32)
    for line in range(first, lines, step):
        if SHOTS == 1 or _adds(line, step, RANKS) == RANK:
            at = line * N + column
            residual = tl.load(RESIDUAL + at, mask=real, other=0.0)
            own = tl.load(PART + at, mask=real, other=0)
            own = _sendable(own, NAN)
            summed = tl.zeros([PADDED], tl.float32)
            absent = 1
            while absent != 0:
                come = tl.full([PADDED], 1, tl.int1)
                for rank in tl.static_range(RANKS):
                    if rank == RANK:
                        bits = own
                    else:
                        bits = tl.load(inbox + rank * room + at, mask=real, other=0, volatile=True)
                        come = come & (bits != -1)
                    number = bits.to(residual.dtype, bitcast=True).to(tl.float32)
                    if rank == 0:
                        summed = number
                    else:
                        summed += number
                absent = tl.max(tl.where(come, 0, 1), 0)
            for rank in tl.static_range(RANKS):
                if rank != RANK:
                    tl.store(inbox + rank * room + at, tl.full([PADDED], -1, own.dtype), mask=real)
            total = (residual.to(tl.float32) + summed.to(residual.dtype).to(tl.float32)).to(residual.dtype)
            bits = total.to(own.dtype, bitcast=True)
            bits = _sendable(bits, NAN)
            if SHOTS == 2:
                for rank in tl.static_range(RANKS):
                    if rank != RANK:
                        tl.store(INBOXES[rank] + RANK * room + at, bits, mask=real, cache_modifier=".wt")
            _store_norm(bits, TOTAL, OUT, weight, at, real, eps, residual.dtype, N, CENTERED)
    if SHOTS == 2:
        for line in range(first, lines, step):
            adds = _adds(line, step, RANKS)
            if adds != RANK:
                at = line * N + column
                come = inbox + adds * room + at
                bits = tl.load(come, mask=real, other=0, volatile=True)
                while tl.min(tl.where(bits == -1, 0, 1), 0) == 0:
                    bits = tl.load(come, mask=real, other=0, volatile=True)
                tl.store(come, tl.full([PADDED], -1, bits.dtype), mask=real)
                _store_norm(bits, TOTAL, OUT, weight, at, real, eps, RESIDUAL.dtype.element_ty, N, CENTERED)


@triton.jit
def _sendable(bits, NAN: tl.constexpr):
    """The bits of numbers, none of which stands for what has not come."""
    return tl.where(bits == -1, NAN, bits).to(bits.dtype)


@triton.jit
def _adds(line, step, RANKS: tl.constexpr):
    """The rank that adds a line in two shots: each has its share of every program's lines."""
    return (line + line // step) % RANKS


@triton.jit
def _store_norm(
    bits, TOTAL, OUT, weight, at, real, eps, DTYPE: tl.constexpr, N: tl.constexpr, CENTERED: tl.constexpr
):
    """A line of the total, as its bits, and its norm."""
    tl.store(TOTAL + at, bits, mask=real)
    h = bits.to(DTYPE, bitcast=True).to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, 0) * (1.0 / N) + eps)
    if CENTERED:
        y = h * (1.0 + weight)
    else:
        y = weight * h.to(DTYPE).to(tl.float32)
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=real)
