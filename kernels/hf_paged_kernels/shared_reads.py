"""Decode attention over blocks that several rows have in common: read once for all of them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from .launching import launch, launches_early
from .tiles import Strides, block_ids, capped, load_tile, precision, token_offsets
from .tuning import Tiling, multiprocessors, room_for, shared_tiling

RECORD = 8
_RECORD = tl.constexpr(RECORD)
LEAST = 2
"""Tiles of a piece at least: each member of it has an answer written and read for every piece."""


class SharedPieces:
    """The programs that read common keys for several rows: `update` writes them on the GPU once a step.

    Groups come as numbers [rows, 8] on the device. Entry i has the place of group i's first member, its
    number of members, the first and the end of its tokens, and the group around it; the innermost group of
    row i; and places 2 i and 2 i + 1 of the list of all members. Groups are counted from 1 and 0 is none:
    zeros are a step in which nothing is shared. A row is in two groups at most, which follow one another
    from its first token on, and all members of a group have the same blocks there.
    """

    def __init__(
        self, query: torch.Tensor, values: torch.Tensor, token_bytes: int, tiling: Tiling | None = None
    ) -> None:
        self.rows, self.query_heads = query.shape[:2]
        self.heads = values.shape[2]
        self.value_dim = values.shape[3]
        lanes = triton.next_power_of_2(self.query_heads // self.heads)
        self.tiling = tiling or shared_tiling(token_bytes, query.dtype == torch.float32)
        self.early = launches_early(query.device)
        """True if the kernel that needs the answers runs beside this one until it does."""
        self.members = max(1, self.tiling.block_m // lanes)
        """Rows of one program."""
        self.target = max(self.heads, self.tiling.per_sm * multiprocessors(query.device))
        cut = self.target // self.heads
        self.most = cut + 2 * (self.rows // self.members) + self.rows
        self.slots = self.members * cut + 2 * self.rows
        """The most answers of members to pieces."""
        ints = {"dtype": torch.int32, "device": query.device}
        self.pieces = torch.zeros(self.most, RECORD, **ints)
        """[most, 8]: the place of the first member, members, first token, end, and the piece's number among
        those of each of its rows.
        """
        self.count = torch.zeros(1, **ints)
        self.of_rows = torch.zeros(self.rows, 4, **ints)
        """Of every row the first token behind its groups, its first slot, and its number of slots."""

    def update(self, groups: torch.Tensor) -> None:
        """Plan a step with these groups."""
        if groups.shape != (self.rows, RECORD) or groups.dtype != torch.int32:
            raise ValueError(
                f"Invalid groups: expected [{self.rows}, {RECORD}] of torch.int32, got {list(groups.shape)} "
                f"of {groups.dtype}"
            )
        launch(
            _plan_shared, (self.rows,),
            groups, self.pieces, self.count, self.of_rows, self.rows, self.heads, self.target,
            TILE=self.tiling.block_n, MEMBERS=self.members, SHARE=LEAST, ROWS=room_for(self.rows),
            num_warps=4,
        )  # fmt: skip

    def read(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor,
        groups: torch.Tensor, scale_log2: float, softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Answers [slots, query_heads, value_dim] of the members of all pieces, and log2 of the sums of their
        exponentials.
        """
        partial = query.new_empty(self.slots, self.query_heads, self.value_dim, dtype=torch.float32)
        weight = query.new_empty(self.slots, self.query_heads, dtype=torch.float32)
        strides = Strides.of(keys, values)
        group = self.query_heads // self.heads
        lanes = triton.next_power_of_2(group)
        key_dim = query.shape[2]
        tiling = self.tiling
        options: dict[str, Any] = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        launch(
            _read_shared, (self.heads, self.most),
            query, keys, values, table, groups, self.pieces, self.count, self.of_rows, partial, weight,
            scale_log2,
            query.stride(0), query.stride(1), table.stride(0),
            KEY_BLOCK=strides.key_block, KEY_TOKEN=strides.key_token, KEY_HEAD=strides.key_head,
            VALUE_BLOCK=strides.value_block, VALUE_TOKEN=strides.value_token, VALUE_HEAD=strides.value_head,
            WIDE=strides.wide, HEADS=self.heads, GROUP=group, LANES=lanes, KEY_DIM=key_dim,
            VALUE_DIM=self.value_dim, KEY_DIMS=max(16, triton.next_power_of_2(key_dim)),
            VALUE_DIMS=max(16, triton.next_power_of_2(self.value_dim)), PAGE=values.shape[1],
            BLOCK_M=max(16, self.members * lanes), TILE=tiling.block_n, STAGES=tiling.stages,
            SOFTCAP=softcap or 0.0, PRECISION=precision(query.dtype), EARLY=self.early, **options,
        )  # fmt: skip
        return partial, weight


@triton.jit
def _cuts(begin, end, share, TILE: tl.constexpr):
    """Into how many pieces the tokens of groups are cut, and the tiles of each."""
    tiles = tl.where(end > begin, tl.cdiv(end, TILE) - begin // TILE, 0)
    size = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, share), 1))
    return tl.cdiv(tiles, tl.maximum(size, 1)), size


@triton.jit(do_not_specialize=["rows", "heads", "target"])
def _plan_shared(
    GROUPS, PIECES, COUNT, OF_ROWS, rows, heads, target,
    TILE: tl.constexpr, MEMBERS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Cut every group into pieces of at most a share of all tiles, and give every row a slot for each of its
    pieces.

    GROUPS [rows, 8], PIECES [most, 8], COUNT [1] and OF_ROWS [rows, 4] as in SharedPieces. Program i writes
    the pieces of group i and the slots of row i. Tiles lie at multiples of TILE.
    """
    mine = tl.program_id(0)
    every = tl.arange(0, ROWS)
    real = every < rows
    at = GROUPS + every * _RECORD
    members = tl.load(at + 1, mask=real, other=0)
    begin = tl.load(at + 2, mask=real, other=0)
    end = tl.where(members > 0, tl.load(at + 3, mask=real, other=0), 0)
    stacks = tl.cdiv(members, MEMBERS)
    work = tl.sum(tl.where(end > begin, tl.cdiv(end, TILE) - begin // TILE, 0) * stacks)
    share = tl.maximum(tl.cdiv(work * heads, target), SHARE)
    cuts, size = _cuts(begin, end, share, TILE)
    pieces = cuts * stacks
    # The pieces of group `mine`.
    is_mine = every == mine
    first = tl.sum(tl.where(every < mine, pieces, 0))
    my_pieces = tl.sum(tl.where(is_mine, pieces, 0))
    my_stacks = tl.maximum(tl.sum(tl.where(is_mine, stacks, 0)), 1)
    my_size = tl.sum(tl.where(is_mine, size, 0))
    my_begin = tl.sum(tl.where(is_mine, begin, 0))
    my_end = tl.sum(tl.where(is_mine, end, 0))
    my_members = tl.sum(tl.where(is_mine, members, 0))
    place = tl.load(GROUPS + mine * _RECORD)
    around = tl.load(GROUPS + mine * _RECORD + 4) - 1
    before = tl.sum(tl.where(every == around, cuts, 0))
    for i in range(0, my_pieces, 32):
        piece = i + tl.arange(0, 32)
        ok = piece < my_pieces
        stack = piece % my_stacks  # programs side by side read the same keys
        cut = piece // my_stacks
        start = (my_begin // TILE + cut * my_size) * TILE
        record = PIECES + (first + piece) * _RECORD
        tl.store(record, place + stack * MEMBERS, mask=ok)
        tl.store(record + 1, tl.minimum(my_members - stack * MEMBERS, MEMBERS), mask=ok)
        tl.store(record + 2, tl.maximum(my_begin, start), mask=ok)
        tl.store(record + 3, tl.minimum(my_end, start + my_size * TILE), mask=ok)
        tl.store(record + 4, before + cut, mask=ok)
    # The slots of row `mine`, behind those of the rows before it.
    inner = tl.load(at + 5, mask=real, other=0) - 1
    outer = tl.load(GROUPS + inner * _RECORD + 4, mask=inner >= 0, other=0) - 1
    slots = _cuts_of(GROUPS, inner, share, TILE) + _cuts_of(GROUPS, outer, share, TILE)
    my_inner = tl.sum(tl.where(is_mine, inner, 0))
    to = OF_ROWS + mine * 4
    tl.store(to, tl.load(GROUPS + my_inner * _RECORD + 3, mask=my_inner >= 0, other=0))
    tl.store(to + 1, tl.sum(tl.where(every < mine, slots, 0)))
    tl.store(to + 2, tl.sum(tl.where(is_mine, slots, 0)))
    if mine == 0:
        tl.store(COUNT, tl.sum(pieces))


@triton.jit
def _cuts_of(GROUPS, groups, share, TILE: tl.constexpr):
    """The pieces of a group of every row; 0 where it is none."""
    there = groups >= 0
    begin = tl.load(GROUPS + groups * _RECORD + 2, mask=there, other=0)
    end = tl.load(GROUPS + groups * _RECORD + 3, mask=there, other=0)
    cuts, _ = _cuts(begin, end, share, TILE)
    return cuts


@triton.jit
def _member(GROUPS, place):
    """The entry of a place in the list of all members."""
    return GROUPS + (place >> 1) * _RECORD + 6 + (place & 1)


@triton.jit
def _read_shared(
    Q, K, V, TABLE, GROUPS, PIECES, COUNT, OF_ROWS, PARTIAL, WEIGHT, scale_log2, q_row, q_head, table_row,
    KEY_BLOCK: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_HEAD: tl.constexpr, WIDE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEY_DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The answers of one piece's members for the GROUP query heads of one key head.

    Q, K, V and TABLE as in decode; GROUPS, PIECES, COUNT and OF_ROWS as in SharedPieces; PARTIAL [slots,
    HEADS * GROUP, VALUE_DIM], WEIGHT [slots, HEADS * GROUP].
    """
    if EARLY:
        cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    piece = tl.program_id(1)
    record = PIECES + piece * _RECORD
    first = tl.load(record)
    members = tl.load(record + 1)
    begin = tl.load(record + 2)
    end = tl.load(record + 3)
    number = tl.load(record + 4)
    if piece >= tl.load(COUNT):
        return
    offsets = tl.arange(0, TILE)
    key_dims = tl.arange(0, KEY_DIMS)
    value_dims = tl.arange(0, VALUE_DIMS)
    lane = tl.arange(0, BLOCK_M)
    asks = (lane // LANES < members) & (lane % LANES < GROUP)
    row = tl.load(_member(GROUPS, first + lane // LANES), mask=asks, other=0)
    slot = tl.load(OF_ROWS + row * 4 + 1, mask=asks, other=0) + number
    query_head = head * GROUP + lane % LANES
    table = TABLE + tl.load(_member(GROUPS, first)).to(tl.int64) * table_row
    start = begin // TILE * TILE
    ids = block_ids(table, start, end, offsets, PAGE, TILE)
    q = load_tile(Q, row.to(tl.int64) * q_row + query_head * q_head, asks, key_dims, KEY_DIM, True)
    keys = K + head.to(tl.int64) * KEY_HEAD
    values = V + head.to(tl.int64) * VALUE_HEAD
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_DIMS], tl.float32)
    for n in tl.range(start, end, TILE, num_stages=STAGES):
        tokens = n + offsets
        seen = (tokens >= begin) & (tokens < end)
        key_at = token_offsets(ids, tokens, KEY_BLOCK, KEY_TOKEN, PAGE, WIDE)
        if KEY_BLOCK == VALUE_BLOCK and KEY_TOKEN == VALUE_TOKEN:
            value_at = key_at
        else:
            value_at = token_offsets(ids, tokens, VALUE_BLOCK, VALUE_TOKEN, PAGE, WIDE)
        ids = block_ids(table, n + TILE, end, offsets, PAGE, TILE)
        k = load_tile(keys, key_at, seen, key_dims, KEY_DIM, True)
        v = load_tile(values, value_at, seen, value_dims, VALUE_DIM, True)
        s = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, SOFTCAP)
        s = tl.where(seen[None, :], s, -float("inf"))
        highest = tl.maximum(m, tl.max(s, 1))
        fade = tl.exp2(m - highest)
        p = tl.exp2(s - highest[:, None])
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        m = highest
    at = slot.to(tl.int64) * (HEADS * GROUP) + query_head
    kept = asks[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(PARTIAL + at[:, None] * VALUE_DIM + value_dims[None, :], acc / total[:, None], mask=kept)
    tl.store(WEIGHT + at, m + tl.log2(total), mask=asks)
