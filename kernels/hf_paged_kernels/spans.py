"""Spans of tokens of one row, as the kernels of several tokens go through them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 64
"""Tokens of a chunk, which is computed at once."""
AT_ONCE = 4
"""Spans that are computed beside each other. Most steps have fewer, and programs without one take time."""
LEAST = 32
"""Channels and columns of a tile at least: of 16 in fp32, Triton 3.6 reads behind its shared memory."""
BORDERS = tl.constexpr(256)
"""Spans whose lengths are read at once."""


def precision_of(x: torch.Tensor, halves: bool) -> str:
    """How `dot` multiplies fp32 beside tokens like x. halves: as sums of bf16."""
    if not x.is_cuda and not x.is_meta:
        return "ieee"
    return "bf16x3" if halves else "tf32x3"


@triton.jit
def nth_span(BEGINS, ENDS, spans, least, number):
    """The span that is `number` among those of at least `least` tokens and 1; -1 if there are fewer."""
    found = tl.full([], -1, tl.int32)
    before = tl.full([], 0, tl.int32)
    for first in range(0, spans, BORDERS):
        span = first + tl.arange(0, BORDERS)
        here = span < spans
        count = tl.load(ENDS + span, mask=here, other=0) - tl.load(BEGINS + span, mask=here, other=0)
        wanted = (count >= least) & (count > 0)
        order = before + tl.cumsum(wanted.to(tl.int32), 0)
        found = tl.maximum(found, tl.max(tl.where(wanted & (order == number + 1), span, -1), 0))
        before += tl.sum(wanted.to(tl.int32), 0)
    return found


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a b in fp32. With "bf16x3", fp32 beside bf16 is the sum of two of bf16, whose products are exact. The
    interpreter, whose PRECISION is "ieee", multiplies fp32 alone.
    """
    if PRECISION == "ieee":
        y = tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif PRECISION == "tf32x3":
        y = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    elif a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        y = tl.dot(a, b)
    elif a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        y = tl.dot(a, (b - high.to(tl.float32)).to(tl.bfloat16), tl.dot(a, high))
    elif b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        y = tl.dot((a - high.to(tl.float32)).to(tl.bfloat16), b, tl.dot(high, b))
    elif PRECISION == "bf16x3":  # Triton's own spills registers
        high = a.to(tl.bfloat16)
        other = b.to(tl.bfloat16)
        y = tl.dot((a - high.to(tl.float32)).to(tl.bfloat16), other)
        y = tl.dot(high, (b - other.to(tl.float32)).to(tl.bfloat16), y)
        y = tl.dot(high, other, y)
    else:
        y = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return y
