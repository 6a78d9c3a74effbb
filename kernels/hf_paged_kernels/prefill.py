"""Paged attention for several query tokens a row: prompts, chunks of prompts, and tokens to verify."""

# A branch on a constant must stay a plain if: Triton compiles the other side away.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .exact import weight_sum
from .launching import launch
from .tiles import LOG2E, Strides, block_ids, capped, check, load_tile, precision, token_offsets
from .tuning import Tiling, in_fixed_tiles, prefill_tiling


class Spans:
    """Which tiles of which rows a launch works on: `update` writes it on the GPU once a step, every layer
    reads it.

    A launch without it has as many tiles for every row as the longest has, and the host does not know that
    number in a captured step. Rows of fewer than `least` query tokens get no tile: another kernel computes
    them. All of its tensors are static, so update and prefill can be captured in a CUDA graph.
    """

    def __init__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: int,
        *,
        least: int = 1,
        tiling: Tiling | None = None,
        invariant: bool = False,
    ) -> None:
        """For tensors shaped as prefill() takes them, and that many rows."""
        tokens = query.shape[0]
        group = query.shape[1] // keys.shape[2]
        self.tiling = tiling or _tiling(query, keys, values, tokens, invariant)
        self.rows = rows
        self.least = least
        self.queries = self.tiling.block_m // triton.next_power_of_2(group)
        """Query tokens of a tile."""
        self.tiles = torch.full(
            (tokens // self.queries + min(rows, tokens // least), 2),
            -1,
            dtype=torch.int32,
            device=query.device,
        )
        """[most, 2]: the row, -1 if there is none, and which of its tiles, counted from its end."""

    def update(self, borders: torch.Tensor) -> None:
        """Lay out a step whose row i has the query tokens borders[i] to borders[i + 1]; borders [rows + 1],
        int32.
        """
        if borders.shape != (self.rows + 1,):
            raise ValueError(
                f"Invalid shape of borders: expected [{self.rows + 1}], got {list(borders.shape)}"
            )
        counts = borders.diff()
        tiles = torch.where(counts >= self.least, (counts + self.queries - 1) // self.queries, 0)
        ends = tiles.cumsum(0)
        place = torch.arange(len(self.tiles), device=borders.device)
        row = torch.searchsorted(ends, place, right=True)
        known = row.clamp(max=self.rows - 1)
        self.tiles[:, 0] = torch.where(row < self.rows, row, -1)
        self.tiles[:, 1] = place - (ends - tiles)[known]


def _tiling(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, most_queries: int, invariant: bool
) -> Tiling:
    """The tiling for rows of at most so many query tokens."""
    dims = sum(max(16, triton.next_power_of_2(data.shape[3])) for data in (keys, values))
    group = query.shape[1] // keys.shape[2]
    exact = query.dtype == torch.float32
    tiling = prefill_tiling(dims * query.element_size(), group * most_queries, exact)
    return in_fixed_tiles(tiling, dims * query.element_size(), exact) if invariant else tiling


def prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    borders: torch.Tensor,
    lengths: torch.Tensor,
    most_queries: int,
    *,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
    spans: Spans | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """softmax(softcap(query keys^T * scale)) values, each query token over what is at or before it.

    query [tokens, query_heads, key_dim], the rows' tokens one behind the other; borders [rows + 1]: row i's
    query tokens are borders[i] to borders[i + 1], and they are the last of its lengths[i] tokens in the
    cache; most_queries: no row has more. keys and values [blocks, block_size, heads, dim] of one layer; table
    [rows, blocks of a row]; lengths and starts [rows], all int32 on the device: tokens before starts[i] are
    not seen, nor those `window` or more behind a query token. With causal False every query token sees what
    the last one sees. sinks [query_heads]. The answer is [tokens, query_heads, value_dim]; a
    query token that sees nothing gives 0. spans: instead of most_queries, which tiles there are, updated for
    these borders; tokens of no tile are left as they are. invariant: a query token's bits depend on its own
    row alone, and are those of `decode`.
    """
    check(query, keys, values, table)
    rows, (block_size, heads, key_dim), value_dim = table.shape[0], keys.shape[1:], values.shape[3]
    if borders.shape != (rows + 1,) or lengths.shape != (rows,):
        raise ValueError(
            f"Invalid shape of borders or lengths: expected [{rows + 1}] and [{rows}], got {borders.shape}, "
            f"{lengths.shape}"
        )
    if out is None:
        out = query.new_empty(*query.shape[:2], value_dim)
    strides = Strides.of(keys, values)
    group = query.shape[1] // heads
    key_dims, value_dims = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    if spans is not None:
        tiling = spans.tiling
        grid = (len(spans.tiles), heads, 1)
    else:
        tiling = tiling or _tiling(query, keys, values, most_queries, invariant)
        grid = (triton.cdiv(most_queries, tiling.block_m // triton.next_power_of_2(group)), heads, rows)
    launch(
        _prefill, grid,
        query, keys, values, table, borders, lengths, lengths if starts is None else starts, out,
        query if sinks is None else sinks,
        lengths if spans is None else spans.tiles,
        (key_dim**-0.5 if scale is None else scale) * LOG2E.value,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), table.stride(0),
        KEY_BLOCK=strides.key_block, KEY_TOKEN=strides.key_token, KEY_HEAD=strides.key_head,
        VALUE_BLOCK=strides.value_block, VALUE_TOKEN=strides.value_token, VALUE_HEAD=strides.value_head,
        WIDE=strides.wide, GROUP=group, GROUPS=triton.next_power_of_2(group), KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_DIMS=key_dims, VALUE_DIMS=value_dims, PAGE=block_size, BLOCK_M=tiling.block_m,
        TILE=tiling.block_n,
        STAGES=tiling.stages, WINDOW=window or 0, CAUSAL=causal, HAS_START=starts is not None,
        SOFTCAP=softcap or 0.0,
        HAS_SINK=sinks is not None, HAS_SPANS=spans is not None,
        INVARIANT=invariant, PRECISION=precision(query.dtype, invariant), num_warps=tiling.warps,
        num_stages=tiling.stages, maxnreg=tiling.registers, enable_fp_fusion=not invariant,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["BORDERS", "LENGTHS", "STARTS"])
def _prefill(
    Q, K, V, TABLE, BORDERS, LENGTHS, STARTS, OUT, SINKS, SPANS, scale_log2, q_token, q_head,
    out_token, out_head, table_row,
    KEY_BLOCK: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_HEAD: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, HAS_START: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_SPANS: tl.constexpr, INVARIANT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o_i = sum_t 2^(s_it - m_i) v_t / sum_t 2^(s_it - m_i), s_it = log2(e) softcap(q_i k_t * scale).

    Over start <= t <= at_i and t > at_i - WINDOW, where at_i is query token i's place: its row's length -
    queries + i (the last one's for all if not CAUSAL). Q [tokens, heads * GROUP, KEY_DIM]; K [blocks, PAGE,
    heads, KEY_DIM]; V [blocks, PAGE, heads, VALUE_DIM]; TABLE [rows, blocks of a row]; BORDERS [rows + 1];
    LENGTHS, STARTS [rows]; SINKS [heads * GROUP]; OUT [tokens, heads * GROUP, VALUE_DIM]; SPANS
    [tiles, 2], the row and the tile of each program. One program takes BLOCK_M / GROUPS query tokens in all
    query heads of one key head, the last tokens of a row first. Only the tiles at the edges of what is seen
    are masked.
    """
    head = tl.program_id(1)
    if HAS_SPANS:
        row = tl.load(SPANS + 2 * tl.program_id(0))
        if row < 0:
            return
        before_end = tl.load(SPANS + 2 * tl.program_id(0) + 1)
    else:
        row = tl.program_id(2)
        before_end = tl.program_id(0)
    STEP: tl.constexpr = BLOCK_M // GROUPS
    border = tl.load(BORDERS + row)
    queries = tl.load(BORDERS + row + 1) - border
    tile = tl.cdiv(queries, STEP) - 1 - before_end
    if tile < 0:
        return
    length = tl.load(LENGTHS + row)
    start = 0
    if HAS_START:
        start = tl.load(STARTS + row)
    offsets = tl.arange(0, TILE)
    key_dims = tl.arange(0, KEY_DIMS)
    value_dims = tl.arange(0, VALUE_DIMS)
    member = tl.arange(0, BLOCK_M) % GROUPS
    asked = tile * STEP + tl.arange(0, BLOCK_M) // GROUPS
    real = (asked < queries) & (member < GROUP)
    query_head = head * GROUP + member
    token = (border + asked).to(tl.int64)
    # The places of the tile's first and last query token.
    lowest = length - queries + tile * STEP
    highest = tl.minimum(lowest + STEP, length) - 1
    at = length - queries + asked
    if not CAUSAL:
        lowest = length - 1
        highest = length - 1
        at = tl.zeros([BLOCK_M], tl.int32) + length - 1
    q = load_tile(Q, token * q_token + query_head * q_head, real, key_dims, KEY_DIM, True)
    keys = K + head.to(tl.int64) * KEY_HEAD
    values = V + head.to(tl.int64) * VALUE_HEAD
    table = TABLE + row.to(tl.int64) * table_row
    # Every query token of the tile sees the tokens from open_from to lowest; none sees one before start or
    # after highest.
    open_from = start
    if WINDOW > 0:
        open_from = tl.maximum(start, highest - WINDOW + 1)
        start = tl.maximum(start, lowest - WINDOW + 1)
    begin = start // TILE * TILE
    end = highest + 1
    closed = tl.maximum((lowest + 1) // TILE * TILE, begin)
    opened = tl.minimum(tl.cdiv(open_from, TILE) * TILE, closed)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_DIMS], tl.float32)
    if HAS_START or WINDOW > 0:
        for n in tl.range(begin, opened, TILE, num_stages=1):
            ids = block_ids(table, n, end, offsets, PAGE, TILE)
            m, total, acc = _attend(
                q, keys, values, ids, n + offsets, at, start, end, scale_log2, key_dims, value_dims, m,
                total, acc,
                KEY_BLOCK, KEY_TOKEN, VALUE_BLOCK, VALUE_TOKEN, WIDE, KEY_DIM, VALUE_DIM, PAGE, WINDOW,
                SOFTCAP, INVARIANT, PRECISION, True,
            )  # fmt: skip
    # As in decoding, the ids of a tile's blocks are loaded one tile ahead.
    ids = block_ids(table, opened, end, offsets, PAGE, TILE)
    for n in tl.range(opened, closed, TILE, num_stages=STAGES):
        these = ids
        ids = block_ids(table, n + TILE, end, offsets, PAGE, TILE)
        m, total, acc = _attend(
            q, keys, values, these, n + offsets, at, start, end, scale_log2, key_dims, value_dims, m,
            total, acc,
            KEY_BLOCK, KEY_TOKEN, VALUE_BLOCK, VALUE_TOKEN, WIDE, KEY_DIM, VALUE_DIM, PAGE, WINDOW, SOFTCAP,
            INVARIANT, PRECISION, False,
        )  # fmt: skip
    for n in tl.range(closed, end, TILE, num_stages=1):
        ids = block_ids(table, n, end, offsets, PAGE, TILE)
        m, total, acc = _attend(
            q, keys, values, ids, n + offsets, at, start, end, scale_log2, key_dims, value_dims, m,
            total, acc,
            KEY_BLOCK, KEY_TOKEN, VALUE_BLOCK, VALUE_TOKEN, WIDE, KEY_DIM, VALUE_DIM, PAGE, WINDOW, SOFTCAP,
            INVARIANT, PRECISION, True,
        )  # fmt: skip
    if HAS_SINK:
        sink = tl.load(SINKS + query_head, mask=real, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        fade = tl.exp2(m - top)
        total = total * fade + tl.exp2(sink - top)
        acc = acc * fade[:, None]
    o = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = OUT + (token * out_token + query_head * out_head)[:, None] + value_dims[None, :]
    tl.store(to, o.to(OUT.dtype.element_ty), mask=real[:, None] & (value_dims < VALUE_DIM)[None, :])


@triton.jit
def _attend(
    q, keys, values, ids, tokens, at, start, end, scale_log2, key_dims, value_dims, m, total, acc,
    KEY_BLOCK: tl.constexpr, KEY_TOKEN: tl.constexpr, VALUE_BLOCK: tl.constexpr, VALUE_TOKEN: tl.constexpr,
    WIDE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    INVARIANT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of the running softmax: `tokens` [TILE] of the blocks `ids` for the queries q [BLOCK_M,
    KEY_DIMS] at `at`.
    """
    key_at = token_offsets(ids, tokens, KEY_BLOCK, KEY_TOKEN, PAGE, WIDE)
    if KEY_BLOCK == VALUE_BLOCK and KEY_TOKEN == VALUE_TOKEN:
        value_at = key_at
    else:
        value_at = token_offsets(ids, tokens, VALUE_BLOCK, VALUE_TOKEN, PAGE, WIDE)
    there = (tokens >= start) & (tokens < end)
    k = load_tile(keys, key_at, there, key_dims, KEY_DIM, MASKED)
    v = load_tile(values, value_at, there, value_dims, VALUE_DIM, MASKED)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    PLAIN: tl.constexpr = SOFTCAP == 0 and not MASKED
    if PLAIN:
        top = tl.maximum(m, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - top[:, None])
        fade = tl.exp2(m - top)
    else:
        s = capped(s, scale_log2, SOFTCAP)
        if MASKED:
            seen = there[None, :] & (tokens[None, :] <= at[:, None])
            if WINDOW > 0:
                seen = seen & (tokens[None, :] > at[:, None] - WINDOW)
            s = tl.where(seen, s, -float("inf"))
        top = tl.maximum(m, tl.max(s, 1))
        shown = tl.where(top == -float("inf"), 0.0, top)
        p = tl.exp2(s - shown[:, None])
        fade = tl.exp2(m - shown)
    total = total * fade + weight_sum(p, INVARIANT)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return top, total, acc
