"""Code shared by the two attention kernels: how a tile of tokens is found, loaded and scored; checks of their
arguments.
"""

# ruff: noqa: RET505 - a branch on a constant must stay a plain if: Triton compiles the other side away
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def block_ids(TABLE, first, end, offsets, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Ids of the blocks that hold the tokens first + offsets below `end`: one if a tile lies in one block,
    else one a token.
    """
    if PAGE % TILE == 0:
        return tl.load(TABLE + first // PAGE, mask=first < end, other=0)
    else:
        SHIFT: tl.constexpr = tl.constexpr(PAGE.bit_length() - 1)
        return tl.load(TABLE + ((first + offsets) >> SHIFT), mask=first + offsets < end, other=0)


@triton.jit
def token_offsets(
    ids,
    tokens,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Where `tokens` [TILE] of the blocks `ids` begin in one head of one layer, in elements."""
    if WIDE:
        return ids.to(tl.int64) * BLOCK_STRIDE + (tokens & (PAGE - 1)).to(tl.int64) * TOKEN_STRIDE
    else:
        return ids.to(tl.int32) * BLOCK_STRIDE + (tokens & (PAGE - 1)) * TOKEN_STRIDE


@triton.jit
def load_tile(base, offsets, seen, dims, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Rows base + offsets [TILE, dims]; columns past DIM, and rows not seen if MASKED, are 0 and never
    read.
    """
    at = base + offsets[:, None] + dims[None, :]
    PADDED: tl.constexpr = dims.shape[0] != DIM
    if MASKED and PADDED:
        return tl.load(at, mask=seen[:, None] & (dims < DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(at, mask=seen[:, None], other=0.0)
    elif PADDED:
        return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def capped(scores, scale_log2, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(scores * scale / SOFTCAP), times log2(e) so that exp2 serves; SOFTCAP 0 is no cap."""
    scores = scores * scale_log2
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (1 + e^2x), and e^2x = 2^(2x log2(e)): the factor is in the scores already.
        scores = SOFTCAP * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / SOFTCAP))))
    return scores


class Strides(NamedTuple):
    """The distances of a layer's keys and values, in elements; compiled into the kernels."""

    key_block: int
    key_token: int
    key_head: int
    value_block: int
    value_token: int
    value_head: int
    wide: bool
    """True if an offset inside the layer may not fit in 32 bits."""

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Strides:
        """Read off keys and values [blocks, block_size, heads, dim]."""
        distances = []
        for data in (keys, values):
            if data.stride(3) != 1:
                raise ValueError(
                    f"Invalid strides of keys or values: the last must be 1, got {data.stride()}"
                )
            distances += [data.stride(0), data.stride(1), data.stride(2)]
        extent = max(
            sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in (keys, values)
        )
        return cls(*distances, wide=extent >= 2**31)


def check(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> None:
    """query [n, query_heads, key_dim], keys and values [blocks, block_size, heads, dim], table [rows, blocks
    of a row].
    """
    if keys.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"Invalid shape of values: expected {[*keys.shape[:3], 'value_dim']}, got {list(values.shape)}"
        )
    block_size, heads, key_dim = keys.shape[1:]
    if query.ndim != 3 or query.shape[2] != key_dim or query.shape[1] % heads:
        raise ValueError(
            f"Invalid shape of query: expected [n, a multiple of {heads}, {key_dim}], got {list(query.shape)}"
        )
    if block_size & (block_size - 1):
        raise ValueError(f"Invalid block_size {block_size}: expected a power of two")
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"Invalid dtypes: query, keys and values must share one, got {query.dtype}, {keys.dtype}, "
            f"{values.dtype}"
        )
    if query.stride(2) != 1 or table.stride(1) != 1:
        raise ValueError("Invalid strides: the last of query and of table must be 1")


def precision(dtype: torch.dtype, invariant: bool = False) -> str:
    """How a product is taken: fp32 in three tf32 passes, which keeps fp32's digits on the tensor cores; if
    invariant, one number after the other.
    """
    if dtype != torch.float32:
        return "tf32"
    return "ieee" if invariant else "tf32x3"
