"""A dense copy of the pages, for attention that cannot read them in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch

TILE = 4096


def gather(
    data: torch.Tensor, table: torch.Tensor, starts: torch.Tensor | None, first: int, columns: int
) -> torch.Tensor:
    """out[i, h, c - first] = data[table[i, t // block_size], t % block_size, h] with t = c - starts[i], for
    first <= c < columns.

    data [blocks, block_size, heads, dim], any strides with the last 1; table [rows, width], int32, any
    distance from row to row; starts [rows], int32 (0 if None). The answer is [rows, heads, columns - first,
    dim] without gaps; columns before a row's start, and those that its table has no block for (past its
    width, or a negative id), are 0.
    """
    if data.ndim != 4 or data.stride(3) != 1:
        raise ValueError(
            "Invalid shape of data: expected [blocks, block_size, heads, dim] with the last stride 1, got "
            f"{list(data.shape)}"
        )
    if table.ndim != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
        raise ValueError(
            f"Invalid table: expected [rows, width] of int32 with the last stride 1, got {list(table.shape)} "
            f"of {table.dtype}"
        )
    rows, width = table.shape
    if starts is not None and (
        starts.shape != (rows,) or starts.dtype != torch.int32 or not starts.is_contiguous()
    ):
        raise ValueError(
            f"Invalid shape of starts: expected [{rows}] of torch.int32, got {list(starts.shape)} of "
            f"{starts.dtype}"
        )
    if not 0 <= first <= columns:
        raise ValueError(f"Invalid first {first}: expected 0 to {columns}")
    page, heads, dim = data.shape[1:]
    out = data.new_empty(rows, heads, columns - first, dim)
    if out.numel() == 0:
        return out
    dims = triton.next_power_of_2(dim)
    at_once = max(1, TILE // dims)
    launch(
        _gather, (triton.cdiv(columns - first, at_once), heads, rows),
        data, table, table if starts is None else starts, out, first, columns, width, table.stride(0),
        DATA_BLOCK=data.stride(0), DATA_TOKEN=data.stride(1), DATA_HEAD=data.stride(2), HEADS=heads, DIM=dim,
        DIMS=dims, PAGE=page,
        HAS_START=starts is not None, AT_ONCE=at_once, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first", "columns", "width", "table_row"])
def _gather(
    DATA, TABLE, STARTS, OUT, first, columns, width, table_row,
    DATA_BLOCK: tl.constexpr, DATA_TOKEN: tl.constexpr, DATA_HEAD: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr, PAGE: tl.constexpr, HAS_START: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """OUT[i, h, c - first] = DATA[TABLE[i, t // PAGE], t % PAGE, h] with t = c - STARTS[i], 0 where t < 0 or
    there is no block.

    DATA [blocks, PAGE, HEADS, DIM]; TABLE [rows, width]; STARTS [rows]; OUT [rows, HEADS, columns - first,
    DIM]. A program takes AT_ONCE columns of one row and head.
    """
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    column = first + tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    dims = tl.arange(0, DIMS)
    token = column
    if HAS_START:
        token = column - tl.load(STARTS + row)
    held = (token >= 0) & (column < columns) & (token // PAGE < width)
    block = tl.load(TABLE + row * table_row + token // PAGE, mask=held, other=-1).to(tl.int64)
    at = DATA + block * DATA_BLOCK + (token % PAGE).to(tl.int64) * DATA_TOKEN + head * DATA_HEAD
    x = tl.load(at[:, None] + dims[None, :], mask=(block >= 0)[:, None] & (dims < DIM)[None, :], other=0.0)
    to = OUT + ((row * HEADS + head) * (columns - first) + (column - first)) * DIM
    tl.store(to[:, None] + dims[None, :], x, mask=(column < columns)[:, None] & (dims < DIM)[None, :])
