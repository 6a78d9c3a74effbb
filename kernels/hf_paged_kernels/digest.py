"""Boil down many tensors that lie anywhere to one number each, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch

GOLDEN = -7046029254386353131
"""2^64 divided by the golden ratio, an odd number, as a signed one: the factor of a word depends on its
place.
"""


def digest(pieces: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
    """The sum of word[i] * ((i * GOLDEN) | 1), modulo 2^64, over the words of each piece: int64 [chosen
    pieces].

    pieces [3, pieces] int64 on the device: the address of the first word (32 bits, aligned), how many words
    are looked at, and how many words each lies behind the one before. `ranges` chooses one or two stretches
    of them. The caller sees to it that all addresses are still what they were.
    """
    if pieces.ndim != 2 or pieces.shape[0] != 3 or pieces.dtype != torch.int64:
        raise ValueError(
            f"Invalid pieces: expected int64 [3, pieces], got {pieces.dtype} {list(pieces.shape)}"
        )
    if not 1 <= len(ranges) <= 2 or any(not 0 <= begin <= end <= pieces.shape[1] for begin, end in ranges):
        raise ValueError(f"Invalid ranges: expected one or two within {pieces.shape[1]} pieces, got {ranges}")
    (begin, end), (other, last) = ranges[0], ranges[-1] if len(ranges) == 2 else (0, 0)
    count = end - begin + last - other
    out = torch.empty(count, dtype=torch.int64, device=pieces.device)
    if count:
        launch(
            _digest,
            (count,),
            pieces,
            out,
            pieces.shape[1],
            begin,
            end - begin,
            other,
            GOLDEN=GOLDEN,
            BLOCK=2048,
            num_warps=8,
        )
    return out


@triton.jit(do_not_specialize=["pieces", "begin", "first", "other"])
def _digest(PIECES, OUT, pieces, begin, first, other, GOLDEN: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[p] = sum of DATA[i * step] * ((i * GOLDEN) | 1): a program for each chosen piece.

    PIECES [3, pieces]: addresses, counts, steps; the first `first` programs take the pieces from `begin` on,
    others those from `other`.
    """
    program = tl.program_id(0)
    piece = tl.where(program < first, begin + program, other + program - first).to(tl.int64)
    data = tl.load(PIECES + piece).to(tl.pointer_type(tl.int32))
    count = tl.load(PIECES + pieces + piece)
    step = tl.load(PIECES + 2 * pieces + piece)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        word = tl.load(data + i * step, mask=i < count, other=0).to(tl.int64)
        total += word * ((i * GOLDEN) | 1)
    tl.store(OUT + program, tl.sum(total))
