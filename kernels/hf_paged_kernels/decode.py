"""Paged decode attention: one query token a row, planned once a step on the GPU, one launch a layer."""

# ruff: noqa: SIM102 - a branch on a constant must stay a plain if: Triton compiles the other side away
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from .exact import weight_sum
from .launching import early, follow, launch
from .shared_reads import SharedPieces
from .tiles import LOG2E, Strides, block_ids, capped, check, load_tile, precision, token_offsets
from .tuning import Tiling, decode_tiling, in_fixed_tiles, multiprocessors, room_for

RECORD = 8
_RECORD = tl.constexpr(RECORD)


class Plan:
    """Which program reads which keys in a decode step: `update` writes it on the GPU once a step, every layer
    of one window reads it.

    Long rows are cut into pieces of about one size, at most `most` in all; a program works on one piece of
    one head, and the last to finish a row merges them. The plan owns their workspace, so one plan serves one
    stream. All of its tensors are static and what depends on lengths is read from device memory: update and
    decode can be captured in a CUDA graph.
    """

    def __init__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        mean_length: int,
        window: int | None = None,
        tiling: Tiling | None = None,
        invariant: bool = False,
        shared: bool = False,
        shared_tiling: Tiling | None = None,
    ) -> None:
        """For tensors shaped as decode() takes them; `mean_length` only chooses the tiling, any length is
        served. invariant: a row's bits depend on that row alone, so none is cut. shared: whether rows read
        common blocks together, where a key head's queries leave room for those of other rows.
        """
        self.invariant = invariant
        self.rows, self.query_heads, self.key_dim = query.shape
        self.block_size, self.heads, self.value_dim = values.shape[1:]
        self.window = window
        group = self.query_heads // self.heads
        token_bytes = (
            triton.next_power_of_2(self.key_dim) + triton.next_power_of_2(self.value_dim)
        ) * keys.element_size()
        if window is not None:
            mean_length = min(mean_length, window)
        if shared and (window is not None or invariant):
            raise ValueError("Invalid shared: groups read what no window hides, in no fixed order of summing")
        pieces = SharedPieces(query, values, token_bytes, shared_tiling) if shared else None
        self.shared = pieces if pieces is not None and pieces.members > 1 else None
        self.tiling = tiling or decode_tiling(
            group, token_bytes, self.rows, self.heads, mean_length, self.shared is not None
        )
        if invariant:
            self.tiling = in_fixed_tiles(self.tiling, token_bytes, keys.dtype == torch.float32)
        self.target = 0 if invariant else self.tiling.per_sm * multiprocessors(query.device)
        self.most = self.target // self.heads + self.rows
        ints = {"dtype": torch.int32, "device": query.device}
        self.pieces = torch.zeros(self.most, RECORD, **ints)
        """[most, 8]: row, first token, end, the row's first piece, its number of pieces, and the first slot
        and the number of slots of what it reads with others.
        """
        self.count = torch.zeros(1, **ints)
        """How many of the pieces count in this step."""
        self.done = torch.zeros(self.rows, self.heads, **ints)
        """Pieces finished of a row and head; 0 again after every launch."""
        self.partial = torch.empty(
            self.most, self.query_heads, self.value_dim, dtype=torch.float32, device=query.device
        )
        self.weight = torch.empty(self.most, self.query_heads, dtype=torch.float32, device=query.device)
        """log2 of the sum of each partial's exponentials."""
        self._none = None if self.shared is None else torch.zeros(self.rows, RECORD, **ints)
        self.groups = self._none
        """Those of the step."""

    def update(
        self,
        lengths: torch.Tensor,
        starts: torch.Tensor | None = None,
        groups: torch.Tensor | None = None,
    ) -> None:
        """Plan a step over the tokens from starts [rows] (0 if None) to lengths [rows], both int32 on the
        device. groups: of rows that read blocks together, as `SharedPieces` has them.
        """
        if lengths.shape != (self.rows,) or (starts is not None and starts.shape != lengths.shape):
            raise ValueError(
                f"Invalid shape of lengths or starts: expected [{self.rows}], got {list(lengths.shape)}"
            )
        of_rows = lengths
        if self.shared is not None:
            self.groups = self._none if groups is None else groups
        if self.shared is not None and self.groups is not None:
            self.shared.update(self.groups)
            of_rows = self.shared.of_rows
        launch(
            _plan, (self.rows,),
            lengths, lengths if starts is None else starts, of_rows, self.pieces, self.count, self.rows,
            self.heads, self.target,
            TILE=self.tiling.block_n, WINDOW=self.window or 0, HAS_START=starts is not None,
            SHARED=self.groups is not None, ROWS=room_for(self.rows), num_warps=4,
        )  # fmt: skip


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(softcap(query keys^T * scale)) values, over the tokens that `plan` was updated for.

    query [rows, query_heads, key_dim]; keys and values [blocks, block_size, heads, dim] of one layer; table
    [rows, blocks of a row], int32: token t of row i lies in block table[i, t // block_size]; sinks
    [query_heads] only take weight. The answer is [rows, query_heads, value_dim]; a row without tokens
    gives 0.
    """
    check(query, keys, values, table)
    shape = (plan.rows, plan.query_heads, plan.key_dim)
    if query.shape != shape or values.shape[1:] != (plan.block_size, plan.heads, plan.value_dim):
        raise ValueError(f"Invalid shape of query: the plan is for {list(shape)}, got {list(query.shape)}")
    if out is None:
        out = query.new_empty(*query.shape[:2], values.shape[3])
    strides = Strides.of(keys, values)
    tiling = plan.tiling
    group = plan.query_heads // plan.heads
    padded = triton.next_power_of_2(plan.value_dim)
    several = triton.next_power_of_2(group) * padded
    scale_log2 = (plan.key_dim**-0.5 if scale is None else scale) * LOG2E.value
    common = plan.partial, plan.weight
    options = early(query.device)
    if plan.shared is not None and plan.groups is not None:
        options = options if plan.shared.early else {"EARLY": False}
        common = plan.shared.read(query, keys, values, table, plan.groups, scale_log2, softcap)
    launch(
        _decode, (plan.heads, plan.most),
        query, keys, values, table, plan.pieces, plan.count, plan.done, plan.partial, plan.weight, *common,
        out, query if sinks is None else sinks, scale_log2,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), table.stride(0),
        KEY_BLOCK=strides.key_block, KEY_TOKEN=strides.key_token, KEY_HEAD=strides.key_head,
        VALUE_BLOCK=strides.value_block, VALUE_TOKEN=strides.value_token, VALUE_HEAD=strides.value_head,
        WIDE=strides.wide, HEADS=plan.heads, GROUP=group, KEY_DIM=plan.key_dim, VALUE_DIM=plan.value_dim,
        KEY_DIMS=max(16, triton.next_power_of_2(plan.key_dim)), VALUE_DIMS=max(16, padded),
        GROUPS=triton.next_power_of_2(group), PAGE=plan.block_size,
        BLOCK_M=max(tiling.block_m, triton.next_power_of_2(group)), TILE=tiling.block_n, STAGES=tiling.stages,
        AT_ONCE=max(1, min(16, 2048 * tiling.warps // several)), SOFTCAP=softcap or 0.0,
        HAS_SINK=sinks is not None, SHARED=plan.groups is not None,
        INVARIANT=plan.invariant, PRECISION=precision(query.dtype, plan.invariant), num_warps=tiling.warps,
        num_stages=tiling.stages, enable_fp_fusion=not plan.invariant, **options,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "heads", "target"])
def _plan(
    LENGTHS, STARTS, OF_ROWS, PIECES, COUNT, rows, heads, target,
    TILE: tl.constexpr, WINDOW: tl.constexpr, HAS_START: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Cut every row that is two shares long into pieces of at most a share, sum(tiles) * heads / target;
    longest pieces first.

    LENGTHS, STARTS [rows]; OF_ROWS [rows, 4] as in SharedPieces; PIECES [most, 8]; COUNT [1]. One program a
    row: it works out the cut of all rows, then writes its own pieces after those of the rows whose pieces are
    longer. Tiles lie at multiples of TILE, whatever the start.
    """
    row = tl.program_id(0)
    every = tl.arange(0, ROWS)
    real = every < rows
    length = tl.load(LENGTHS + every, mask=real, other=0)
    start = tl.zeros([ROWS], tl.int32)
    if HAS_START:
        start = tl.load(STARTS + every, mask=real, other=0)
    if WINDOW > 0:
        start = tl.maximum(start, length - WINDOW)
    if SHARED:
        start = tl.maximum(start, tl.load(OF_ROWS + every * 4, mask=real, other=0))
    tiles = tl.where(length > start, (length + TILE - 1) // TILE - start // TILE, 0)
    share = tl.maximum((tl.sum(tiles) * heads + target - 1) // tl.maximum(target, 1), 1)
    if target == 0:
        share = 2**29  # no row is cut
    size = tl.cdiv(tiles, tl.where(tiles < 2 * share, 1, tl.cdiv(tiles, share)))
    pieces = tl.where(
        real, tl.maximum(tl.cdiv(tiles, tl.maximum(size, 1)), 1), 0
    )  # an empty row is one empty piece
    mine = every == row
    my_size = tl.sum(tl.where(mine, size, 0))
    my_pieces = tl.sum(tl.where(mine, pieces, 0))
    my_length = tl.sum(tl.where(mine, length, 0))
    my_start = tl.sum(tl.where(mine, start, 0))
    before = (size > my_size) | ((size == my_size) & (every < row))
    first = tl.sum(tl.where(before, pieces, 0))
    for i in range(0, my_pieces, 32):
        piece = i + tl.arange(0, 32)
        ok = piece < my_pieces
        begin = (my_start // TILE + piece * my_size) * TILE
        record = PIECES + (first + piece) * _RECORD
        tl.store(record, tl.zeros([32], tl.int32) + row, mask=ok)
        tl.store(record + 1, tl.maximum(my_start, begin), mask=ok)
        tl.store(record + 2, tl.minimum(my_length, begin + my_size * TILE), mask=ok)
        tl.store(record + 3, tl.zeros([32], tl.int32) + first, mask=ok)
        tl.store(record + 4, tl.zeros([32], tl.int32) + my_pieces, mask=ok)
        if SHARED:
            tl.store(record + 5, tl.zeros([32], tl.int32) + tl.load(OF_ROWS + row * 4 + 1), mask=ok)
            tl.store(record + 6, tl.zeros([32], tl.int32) + tl.load(OF_ROWS + row * 4 + 2), mask=ok)
    if row == 0:
        tl.store(COUNT, tl.sum(pieces))


@triton.jit
def _decode(
    Q, K, V, TABLE, PIECES, COUNT, DONE, PARTIAL, WEIGHT, COMMON, COMMON_WEIGHT, OUT, SINKS, scale_log2,
    q_row, q_head, out_row, out_head, table_row,
    KEY_BLOCK: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_HEAD: tl.constexpr, WIDE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, AT_ONCE: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINK: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr,
    INVARIANT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = sum_t 2^(s_t - m) v_t / sum_t 2^(s_t - m), s = log2(e) softcap(q k_t * scale), m = max s.

    Q [rows, HEADS * GROUP, KEY_DIM]; K [blocks, PAGE, HEADS, KEY_DIM]; V [blocks, PAGE, HEADS, VALUE_DIM];
    TABLE [rows, blocks of a row]; PIECES [most, 8], COUNT [1], DONE [rows, HEADS], PARTIAL [most, HEADS *
    GROUP, VALUE_DIM] and WEIGHT [most, HEADS * GROUP] as in Plan; COMMON and COMMON_WEIGHT the same of slots;
    SINKS [HEADS * GROUP]; OUT [rows, HEADS * GROUP, VALUE_DIM]. One program reads one piece of one row for
    the GROUP query heads of one key head. EARLY: the
    kernel before may still run; if SHARED it is _read_shared, until the first merge.
    """
    if not SHARED:
        follow(EARLY)
    head = tl.program_id(0)
    piece = tl.program_id(1)
    record = PIECES + piece * _RECORD
    row = tl.load(record)
    begin = tl.load(record + 1)
    end = tl.load(record + 2)
    first = tl.load(record + 3)
    pieces = tl.load(record + 4)
    common = 0
    if SHARED:
        common = tl.load(record + 6)
    if piece >= tl.load(COUNT):
        return
    offsets = tl.arange(0, TILE)
    key_dims = tl.arange(0, KEY_DIMS)
    value_dims = tl.arange(0, VALUE_DIMS)
    member = tl.arange(0, BLOCK_M)
    asks = member < GROUP
    query_head = head * GROUP + member
    table = TABLE + row.to(tl.int64) * table_row
    start = begin // TILE * TILE
    # The ids of a tile's blocks are loaded one tile ahead: a load of keys that waits for no load of its own
    # round is buffered.
    ids = block_ids(table, start, end, offsets, PAGE, TILE)
    q = load_tile(Q + row.to(tl.int64) * q_row, query_head * q_head, asks, key_dims, KEY_DIM, True)
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
        total = total * fade + weight_sum(p, INVARIANT)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        m = highest
    if HAS_SINK:
        if piece == first:
            sink = tl.load(SINKS + query_head, mask=asks, other=0.0).to(tl.float32) * LOG2E
            highest = tl.maximum(m, sink)
            fade = tl.exp2(m - highest)
            total = total * fade + tl.exp2(sink - highest)
            acc = acc * fade[:, None]
            m = highest
    o = acc / tl.where(total > 0, total, 1.0)[:, None]
    kept = asks[:, None] & (value_dims < VALUE_DIM)[None, :]
    if pieces + common == 1:
        to = OUT + row.to(tl.int64) * out_row + query_head[:, None] * out_head + value_dims[None, :]
        tl.store(to, o.to(OUT.dtype.element_ty), mask=kept)
    else:
        at = piece * (HEADS * GROUP) + query_head
        tl.store(PARTIAL + at[:, None] * VALUE_DIM + value_dims[None, :], o, mask=kept)
        tl.store(WEIGHT + at, m + tl.log2(total), mask=asks)
        tl.debug_barrier()  # all of the program's partial is written before it counts itself done
        if tl.atomic_add(DONE + row * HEADS + head, 1, sem="acq_rel") == pieces - 1:
            # What was read with others goes first: it has tokens, and an own part may have none.
            slot = 0
            if SHARED:
                slot = tl.load(record + 5)
            if SHARED and EARLY:
                cuda.gdc_wait()  # for what was read with others
            _merge(
                PARTIAL, WEIGHT, COMMON, COMMON_WEIGHT, OUT + row.to(tl.int64) * out_row, out_head, head,
                first, pieces, slot, common,
                SHARED, HEADS, GROUP, GROUPS, VALUE_DIM, VALUE_DIMS, AT_ONCE,
            )  # fmt: skip
            tl.store(DONE + row * HEADS + head, 0)
    if SHARED and EARLY:
        if piece == 0:
            cuda.gdc_wait()  # who waits for this kernel waits for the one before, too


@triton.jit
def _merge(
    PARTIAL, WEIGHT, COMMON, COMMON_WEIGHT, OUT, out_head, head, first, pieces, slot, common,
    SHARED: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """OUT[h] = sum_i 2^WEIGHT[i, h] PARTIAL[i, h] / sum_i 2^WEIGHT[i, h] over one row's slots of
    COMMON and its pieces.

    PARTIAL [most, HEADS * GROUP, VALUE_DIM], WEIGHT [most, HEADS * GROUP], COMMON and COMMON_WEIGHT the same
    of slots, OUT [HEADS * GROUP, VALUE_DIM] of the row.
    """
    member = tl.arange(0, GROUPS)
    dims = tl.arange(0, VALUE_DIMS)
    asks = member < GROUP
    query_head = head * GROUP + member
    m = tl.full([GROUPS], -float("inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    acc = tl.zeros([GROUPS, VALUE_DIMS], tl.float32)
    if SHARED:
        m, total, acc = _add_parts(
            COMMON, COMMON_WEIGHT, m, total, acc, query_head, asks, dims, slot, common,
            HEADS * GROUP, VALUE_DIM, AT_ONCE,
        )  # fmt: skip
    m, total, acc = _add_parts(
        PARTIAL, WEIGHT, m, total, acc, query_head, asks, dims, first, pieces, HEADS * GROUP, VALUE_DIM,
        AT_ONCE,
    )  # fmt: skip
    o = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = OUT + query_head[:, None] * out_head + dims[None, :]
    tl.store(to, o.to(OUT.dtype.element_ty), mask=asks[:, None] & (dims < VALUE_DIM)[None, :])


@triton.jit
def _add_parts(
    PARTIAL, WEIGHT, m, total, acc, query_head, asks, dims, first, count,
    QUERY_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The sums with `count` more partials from `first` on, AT_ONCE of them at a time. Other programs have
    written them: they are read past the first-level cache.
    """
    for i in range(0, count, AT_ONCE):
        piece = i + tl.arange(0, AT_ONCE)
        at = (first + piece).to(tl.int64)[:, None] * QUERY_HEADS + query_head[None, :]
        ok = (piece < count)[:, None] & asks[None, :]
        weight = tl.load(WEIGHT + at, mask=ok, other=-float("inf"), cache_modifier=".cg")
        kept = ok[:, :, None] & (dims < VALUE_DIM)[None, None, :]
        part = tl.load(
            PARTIAL + at[:, :, None] * VALUE_DIM + dims[None, None, :],
            mask=kept,
            other=0.0,
            cache_modifier=".cg",
        )
        highest = tl.where(asks, tl.maximum(m, tl.max(weight, 0)), 0.0)
        fade = tl.exp2(m - highest)
        share = tl.exp2(weight - highest[None, :])
        total = total * fade + tl.sum(share, 0)
        acc = acc * fade[:, None] + tl.sum(part * share[:, :, None], 0)
        m = highest
    return m, total, acc
