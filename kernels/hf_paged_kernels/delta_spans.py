"""Several tokens of the gated delta rule, by slots of its state.

A chunk of tokens is a triangular system, for its keys and gates alone: the first kernel inverts those of all
chunks at once, the second goes through the chunks of each sequence with its state. Gates of each channel are
between two tokens in the products of their keys, which the first kernel then takes for both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .delta_step import EPS
from .launching import launch
from .slots import check_last, check_slots, read_state, write_state
from .spans import AT_ONCE, CHUNK, LEAST, dot, nth_span, precision_of

PARTS = 8
"""Programs that invert the chunks of a span of unknown length."""
WEAKEST = tl.constexpr(-128.0)
"""The exponent of a gate over a chunk from which on the gates of two tokens are no quotient of fp32."""
BLOCK = tl.constexpr(16)
"""Tokens of a system that is solved token by token; larger ones are put together by products."""


def delta_spans(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    *,
    longest: int | None = None,
    least: int = 1,
    l2norm: bool = False,
) -> torch.Tensor:
    """The gated delta rule (`delta_step`) over spans of tokens, each behind the state in a slot.

    query and key [tokens, key_heads, D], value [tokens, heads, Dv], each with the last stride 1; decay
    [tokens, heads], or [tokens, heads, D] with the last stride 1; beta [tokens, heads]; states [slots, heads,
    D, Dv]; source and target [spans], int64; begins and ends [spans], whole numbers: a span is the tokens
    from begins[i] to ends[i], at most `longest`. Spans come in the order of their tokens; those of fewer than
    `least` are left out. All is computed in fp32. The answers are written to these tokens of out [tokens,
    heads, Dv].
    """
    tokens, key_heads, dim = key.shape
    heads, width = value.shape[1:]
    if query.shape != key.shape or value.shape[0] != tokens or heads % key_heads or out.shape != value.shape:
        raise ValueError(
            f"Invalid shape of query, key, value or out: expected [tokens, key_heads, D] twice and [tokens, "
            f"n * key_heads, Dv] twice, got {list(query.shape)}, {list(key.shape)}, {list(value.shape)} and "
            f"{list(out.shape)}"
        )
    by_channel = decay.ndim == 3
    wanted = (tokens, heads, dim) if by_channel else (tokens, heads)
    if decay.shape != wanted or beta.shape != (tokens, heads):
        raise ValueError(
            f"Invalid shape of decay or beta: expected [{tokens}, {heads}] or [{tokens}, {heads}, {dim}], "
            f"and [{tokens}, {heads}], got {list(decay.shape)} and {list(beta.shape)}"
        )
    spans = len(begins)
    check_slots(states, (heads, dim, width), source, target, spans)
    check_last(query=query, key=key, value=value, out=out)
    if by_channel:
        check_last(decay=decay)
    tile = LEAST
    parts = PARTS if longest is None else triton.cdiv(longest, CHUNK)
    if not spans or not out.numel() or not parts:
        return out
    at_once = min(spans, AT_ONCE)
    chunks = tokens // CHUNK + min(spans, tokens // max(least, 1)) + 1
    systems = key.new_empty((chunks, heads, 1 + by_channel, CHUNK, CHUNK), dtype=torch.float32)
    halves = key.dtype == torch.bfloat16 and not by_channel
    shape = {
        "D": dim, "DIMS": max(LEAST, triton.next_power_of_2(dim)), "CHUNK": CHUNK, "HEADS": heads,
        "GROUP": heads // key_heads, "BY_CHANNEL": by_channel, "L2NORM": l2norm, "EPS": EPS,
        "PRECISION": precision_of(key, key.dtype == torch.bfloat16), "num_warps": 4 if halves else 8,
    }  # fmt: skip
    given = *decay.stride()[:2], *beta.stride(), spans, least, dim**-0.5
    launch(
        _solve, (parts, heads, at_once),
        systems, query, key, decay, beta, begins, ends, *query.stride()[:2], *key.stride()[:2], *given,
        **shape, num_stages=1,
    )  # fmt: skip
    launch(
        _delta_spans, (triton.cdiv(width, tile), heads, at_once),
        out, query, key, value, decay, beta, systems, states, source, target, begins, ends, *out.stride()[:2],
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], states.stride(0), *given,
        **shape, WIDTH=width, TILE=tile, num_stages=2 if halves else 1,
    )  # fmt: skip
    return out


@triton.jit
def _rows_of(X, token, stride, offset, channel, real):
    """Rows [CHUNK, DIMS] of X."""
    return tl.load(X + token[:, None] * stride + offset + channel[None, :], mask=real, other=0.0)


@triton.jit
def _norms(x, NORM: tl.constexpr, EPS: tl.constexpr):
    """The factors [CHUNK] that normalise the rows of x, if wanted."""
    sums = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    return tl.rsqrt(sums + EPS) if NORM else tl.zeros_like(sums) + 1.0


@triton.jit(do_not_specialize=["spans", "least", "scale"])
def _solve(
    SYSTEMS, Q, K, DECAY, BETA, BEGINS, ENDS, q_token, q_head, k_token, k_head,
    decay_token, decay_head, beta_token, beta_head, spans, least, scale,
    D: tl.constexpr, DIMS: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    BY_CHANNEL: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """SYSTEMS [chunks, HEADS, 1 or 2, CHUNK, CHUNK]: (1 + A)^-1 of each chunk, where A[i, j] = beta_i
    (k_i k_j) exp(decay from j to i) below the diagonal; BY_CHANNEL followed by the products of queries and
    keys, with the gates between them. Chunk c of span i, the n-th of those wanted, has the place c +
    begins[i] / CHUNK + n, and no other has it.
    """
    head = tl.program_id(1)
    shared = head // GROUP
    place = tl.arange(0, CHUNK)
    channel = tl.arange(0, DIMS)
    square = place[:, None] * CHUNK + place[None, :]
    below = place[:, None] > place[None, :]
    upto = place[:, None] >= place[None, :]
    number = tl.program_id(2)
    span = nth_span(BEGINS, ENDS, spans, least, number)
    while span >= 0:
        first = tl.load(BEGINS + span)
        end = tl.load(ENDS + span)
        for begin in range(first + tl.program_id(0) * CHUNK, end, tl.num_programs(0) * CHUNK):
            at = ((begin - first) // CHUNK + first // CHUNK + number).to(tl.int64) * HEADS + head
            at *= (1 + BY_CHANNEL) * CHUNK * CHUNK
            token = begin + place
            here = token < end
            beta = tl.load(BETA + token * beta_token + head * beta_head, mask=here, other=0.0).to(tl.float32)
            real = here[:, None] & (channel < D)[None, :]
            k = _rows_of(K, token, k_token, shared * k_head, channel, real)
            norms = _norms(k, L2NORM, EPS)
            if BY_CHANNEL:
                q = _rows_of(Q, token, q_token, shared * q_head, channel, real)
                q = q.to(tl.float32) * (_norms(q, L2NORM, EPS) * scale)[:, None]
                k = k.to(tl.float32) * norms[:, None]
                decay = _rows_of(DECAY, token, decay_token, head * decay_head, channel, real).to(tl.float32)
                total = tl.sum(decay, 0)
                if tl.min(total) > WEAKEST:
                    gates = tl.cumsum(decay, 0) - total[None, :] * 0.5
                    early = tl.trans(k * tl.exp(-gates))
                    gates = tl.exp(gates)
                    a = dot(k * gates, early, PRECISION)
                    pairs = dot(q * gates, early, PRECISION)
                else:
                    a, pairs = _gated_pairs(
                        q, k, decay, K + shared * k_head, DECAY + head * decay_head, token, k_token,
                        decay_token, place, channel, real, L2NORM, EPS, PRECISION,
                    )  # fmt: skip
                pairs = tl.where(upto, pairs, 0.0)
                tl.store(SYSTEMS + at + CHUNK * CHUNK + square, pairs)
            else:
                decay = tl.load(DECAY + token * decay_token + head * decay_head, mask=here, other=0.0)
                sums = tl.cumsum(decay.to(tl.float32), 0)
                fade = tl.exp(tl.where(below, sums[:, None] - sums[None, :], 0.0))
                a = dot(k, tl.trans(k), PRECISION) * fade * norms[:, None] * norms[None, :]
            a = tl.where(below, a * beta[:, None], 0.0)
            tl.store(SYSTEMS + at + square, _inverse(a, place, CHUNK, PRECISION))
        number += tl.num_programs(2)
        span = nth_span(BEGINS, ENDS, spans, least, number)


@triton.jit
def _inverse(a, place, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + a)^-1 of a [CHUNK, CHUNK] below the diagonal: row by row in blocks along the diagonal, which then
    double: of two beside each other with a' below the first, the inverse has -y a' x there.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    i = tl.arange(0, BLOCK)
    block = tl.arange(0, BLOCKS)
    of_row = place // BLOCK
    mine = of_row[:, None, None] == block[None, :, None]
    wide = tl.reshape(a, [CHUNK, BLOCKS, BLOCK])
    blocks = tl.reshape(tl.sum(tl.where(mine, wide, 0.0), 1), [BLOCKS, BLOCK, BLOCK])
    turned = tl.trans(blocks, 0, 2, 1)
    x = tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0) + tl.zeros_like(blocks)
    for row in range(1, BLOCK):
        weights = tl.sum(tl.where(i[None, None, :] == row, turned, 0.0), 2)
        change = tl.sum(weights[:, :, None] * x, 1)
        x = tl.where(i[None, :, None] == row, x - change[:, None, :], x)
    wide = tl.where(mine, tl.reshape(x, [CHUNK, BLOCK])[:, None, :], 0.0)
    inverse = tl.reshape(wide, [CHUNK, CHUNK])
    for half in tl.static_range(2):
        between = dot(inverse, tl.where(_beside(place, BLOCK * (half + 1)), a, 0.0), PRECISION)
        inverse -= dot(between, inverse, PRECISION)
    return inverse


@triton.jit
def _beside(place, SIZE: tl.constexpr):
    """True where rows are those of the second of two blocks of SIZE, and columns those of the first."""
    block = place // SIZE
    return (block[:, None] == block[None, :] + 1) & (block[None, :] % 2 == 0)


@triton.jit
def _within(decay, CHUNK: tl.constexpr, DIMS: tl.constexpr, SIZE: tl.constexpr):
    """The gates [CHUNK, DIMS] from the begin of a token's block of SIZE to it, and from it to the end."""
    parts = tl.reshape(decay, [CHUNK // SIZE, SIZE, DIMS])
    upto = tl.cumsum(parts, 1)
    behind = tl.sum(parts, 1)[:, None, :] - upto
    return tl.reshape(tl.exp(upto), [CHUNK, DIMS]), tl.reshape(tl.exp(behind), [CHUNK, DIMS])


@triton.jit
def _gated_pairs(
    q, k, decay, K, DECAY, token, k_token, decay_token, place, channel, real,
    L2NORM: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products [CHUNK, CHUNK] of keys k with those before them, and of queries q with theirs too, each
    channel with its gates between the two tokens. No exponent is above zero.
    """
    CHUNK: tl.constexpr = k.shape[0]
    DIMS: tl.constexpr = k.shape[1]
    block = place // BLOCK
    same = block[:, None] == block[None, :]
    keys = tl.zeros([CHUNK, CHUNK], tl.float32)
    queries = tl.zeros([CHUNK, CHUNK], tl.float32)
    passed = tl.zeros([CHUNK, DIMS], tl.float32)
    for behind in range(BLOCK):
        earlier = token - behind
        known = real & (place >= behind)[:, None]
        other = _rows_of(K, earlier, k_token, 0, channel, known)
        faded = other.to(tl.float32) * _norms(other, L2NORM, EPS)[:, None] * tl.exp(passed)
        pair = same & (place[None, :] == place[:, None] - behind)
        keys += tl.where(pair, tl.sum(k * faded, 1)[:, None], 0.0)
        queries += tl.where(pair, tl.sum(q * faded, 1)[:, None], 0.0)
        passed += _rows_of(DECAY, earlier, decay_token, 0, channel, known).to(tl.float32)
    for half in tl.static_range(2):
        upto, behind = _within(decay, CHUNK, DIMS, BLOCK * (half + 1))
        early = tl.trans(k * behind)
        beside = _beside(place, BLOCK * (half + 1))
        keys += tl.where(beside, dot(k * upto, early, PRECISION), 0.0)
        queries += tl.where(beside, dot(q * upto, early, PRECISION), 0.0)
    return keys, queries


@triton.jit(do_not_specialize=["spans", "least", "scale"])
def _delta_spans(
    OUT, Q, K, V, DECAY, BETA, SYSTEMS, STATES, SOURCE, TARGET, BEGINS, ENDS, out_token, out_head,
    q_token, q_head, k_token, k_head, v_token, v_head, state_stride, decay_token, decay_head, beta_token,
    beta_head, spans, least, scale,
    D: tl.constexpr, DIMS: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    BY_CHANNEL: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program takes TILE columns of the states of one head through the chunks of spans."""
    head = tl.program_id(1)
    shared = head // GROUP
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, DIMS)
    place = tl.arange(0, CHUNK)
    square = place[:, None] * CHUNK + place[None, :]
    wide = column < WIDTH
    inside = (head * D + channel)[:, None] * WIDTH + column[None, :]
    whole = (channel < D)[:, None] & wide[None, :]
    upto = place[:, None] >= place[None, :]
    number = tl.program_id(2)
    span = nth_span(BEGINS, ENDS, spans, least, number)
    while span >= 0:
        first = tl.load(BEGINS + span)
        end = tl.load(ENDS + span)
        at = ((first // CHUNK + number).to(tl.int64) * HEADS + head) * ((1 + BY_CHANNEL) * CHUNK * CHUNK)
        state = read_state(STATES, SOURCE, span, state_stride, inside, whole)
        for begin in range(first, end, CHUNK):
            token = begin + place
            here = token < end
            real = here[:, None] & (channel < D)[None, :]
            each = here[:, None] & wide[None, :]
            k = _rows_of(K, token, k_token, shared * k_head, channel, real)
            q = _rows_of(Q, token, q_token, shared * q_head, channel, real)
            v = tl.load(V + token[:, None] * v_token + head * v_head + column[None, :], mask=each, other=0.0)
            beta = tl.load(BETA + token * beta_token + head * beta_head, mask=here, other=0.0).to(tl.float32)
            inverse = tl.load(SYSTEMS + at + square)
            ks = _norms(k, L2NORM, EPS)
            qs = _norms(q, L2NORM, EPS) * scale
            if BY_CHANNEL:
                decay = _rows_of(DECAY, token, decay_token, head * decay_head, channel, real).to(tl.float32)
                sums = tl.cumsum(decay, 0)
                last = tl.sum(decay, 0)  # tokens behind the end do not decay
                faded = tl.exp(sums)
                k = k.to(tl.float32) * ks[:, None]
                known = dot(k * faded, state, PRECISION)
                y = dot(q.to(tl.float32) * qs[:, None] * faded, state, PRECISION)
                k *= tl.exp(last[None, :] - sums)
                kept = tl.exp(last)[:, None]
                pairs = tl.load(SYSTEMS + at + CHUNK * CHUNK + square)
                ks = tl.full([CHUNK], 1.0, tl.float32)
            else:
                decay = tl.load(DECAY + token * decay_token + head * decay_head, mask=here, other=0.0)
                sums = tl.cumsum(decay.to(tl.float32), 0)
                last = tl.sum(decay.to(tl.float32), 0)
                known = dot(k, state, PRECISION) * (ks * tl.exp(sums))[:, None]
                y = dot(q, state, PRECISION) * (qs * tl.exp(sums))[:, None]
                fade = tl.exp(tl.where(upto, sums[:, None] - sums[None, :], 0.0))
                pairs = dot(q, tl.trans(k), PRECISION) * fade * qs[:, None] * ks[None, :]
                pairs = tl.where(upto, pairs, 0.0)
                ks *= tl.exp(last - sums)
                kept = tl.exp(last)
            delta = dot(inverse, (v.to(tl.float32) - known) * beta[:, None], PRECISION)
            y += dot(pairs, delta, PRECISION)
            tl.store(
                OUT + token[:, None] * out_token + head * out_head + column[None, :],
                y.to(OUT.dtype.element_ty), mask=each,
            )  # fmt: skip
            state = state * kept + dot(tl.trans(k), delta * ks[:, None], PRECISION)
            at += HEADS * (1 + BY_CHANNEL) * CHUNK * CHUNK
        write_state(STATES, TARGET, span, state_stride, inside, whole, state)
        number += tl.num_programs(2)
        span = nth_span(BEGINS, ENDS, spans, least, number)
