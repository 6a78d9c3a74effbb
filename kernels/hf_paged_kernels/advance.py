"""The first launch of a captured step: where its tokens go, and how long its rows are then."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch

MOST_NEW = 64
TILE = 128


def advance(
    table: torch.Tensor,
    lengths: torch.Tensor,
    seen: torch.Tensor,
    slots: torch.Tensor,
    columns: torch.Tensor,
    new: int,
    block_size: int,
) -> None:
    """slots[i * new + j] = table[i, p // block_size] * block_size + p % block_size with p = lengths[i] + j;
    lengths[i] += new.

    And seen[i] = lengths[i] after that. A row of length -1 only fills up the batch: its slots are -1, it sees
    0 and stays at -1. columns = [before, after] becomes [after, after + new]. table [rows, width], int32, any
    distance from row to row; lengths and seen [rows], int32; slots [rows * new], int64; columns [2], int64. A
    token that the table has no block for (past its width, or a negative id) gets slot -1: it is written
    nowhere.
    """
    if not 1 <= new <= MOST_NEW:
        raise ValueError(f"Invalid new {new}: expected 1 to {MOST_NEW}")
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"Invalid block_size {block_size}: expected a power of two")
    if table.ndim != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
        raise ValueError(
            f"Invalid table: expected [rows, width] of int32 with the last stride 1, got {list(table.shape)} "
            f"of {table.dtype}"
        )
    rows, width = table.shape
    _check("lengths", lengths, rows, torch.int32)
    _check("seen", seen, rows, torch.int32)
    _check("slots", slots, rows * new, torch.int64)
    _check("columns", columns, 2, torch.int64)
    news = triton.next_power_of_2(new)
    at_once = TILE // news
    launch(
        _advance, (max(1, triton.cdiv(rows, at_once)),),
        table, lengths, seen, slots, columns, rows, width, table.stride(0),
        NEW=new, NEWS=news, AT_ONCE=at_once, PAGE=block_size, num_warps=TILE // 32,
    )  # fmt: skip


def _check(name: str, tensor: torch.Tensor, size: int, dtype: torch.dtype) -> None:
    if tensor.shape != (size,):
        raise ValueError(f"Invalid shape of {name}: expected [{size}], got {list(tensor.shape)}")
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"Invalid {name}: expected contiguous {dtype}, got {tensor.dtype} with strides {tensor.stride()}"
        )


@triton.jit(do_not_specialize=["rows", "width", "table_row"])
def _advance(
    TABLE, LENGTHS, SEEN, SLOTS, COLUMNS, rows, width, table_row,
    NEW: tl.constexpr, NEWS: tl.constexpr, AT_ONCE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """SLOTS[i * NEW + j] = TABLE[i, p // PAGE] * PAGE + p % PAGE, p = LENGTHS[i] + j; SEEN[i] = LENGTHS[i] =
    LENGTHS[i] + NEW.

    TABLE [rows, width]; LENGTHS, SEEN [rows]; SLOTS [rows * NEW]; COLUMNS [2]. A program takes AT_ONCE rows,
    NEWS >= NEW lanes each, so no other program reads the lengths that it writes.
    """
    lane = tl.arange(0, AT_ONCE * NEWS)
    row = tl.program_id(0) * AT_ONCE + lane // NEWS
    j = lane % NEWS
    real = (row < rows) & (j < NEW)
    length = tl.load(LENGTHS + row, mask=real, other=-1)
    held = length >= 0
    at = length + j
    block = at // PAGE
    block_id = tl.load(
        TABLE + row.to(tl.int64) * table_row + block, mask=held & real & (block < width), other=-1
    )
    slot = tl.where(block_id >= 0, block_id.to(tl.int64) * PAGE + at % PAGE, -1)
    tl.store(SLOTS + row * NEW + j, slot, mask=real)
    tl.debug_barrier()  # every lane of a row has read its length before the first one writes it
    tl.store(LENGTHS + row, length + NEW, mask=held & real & (j == 0))
    tl.store(SEEN + row, tl.where(held, length + NEW, 0), mask=real & (j == 0))
    if tl.program_id(0) == 0:
        after = tl.load(COLUMNS + 1)
        tl.store(COLUMNS, after)
        tl.store(COLUMNS + 1, after + NEW)
