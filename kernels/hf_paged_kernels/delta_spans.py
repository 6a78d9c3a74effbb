"""Several tokens of the gated delta rule, by slots of its state.

A chunk of tokens is a triangular system, for its keys and gates alone: the first kernel inverts those of all
chunks at once, the second goes through the chunks of each sequence with its state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .delta_step import EPS
from .launching import launch
from .slots import check_last, check_slots, read_state, write_state

CHUNK = 64
"""Tokens of a chunk."""
PARTS = 8
"""Programs that invert the chunks of a span of unknown length."""
AT_ONCE = 32
"""Spans that are computed beside each other."""


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

    query and key [tokens, key_heads, D], value [tokens, heads, Dv], each with the last stride 1; decay and
    beta [tokens, heads]; states [slots, heads, D, Dv]; source and target [spans], int64; begins and ends
    [spans], whole numbers: a span is the tokens from begins[i] to ends[i], at most `longest`. Spans come in
    the order of their tokens; those of fewer than `least` are left out. All is computed in fp32. The answers
    are written to these tokens of out [tokens, heads, Dv].
    """
    tokens, key_heads, dim = key.shape
    heads, width = value.shape[1:]
    if query.shape != key.shape or value.shape[0] != tokens or heads % key_heads or out.shape != value.shape:
        raise ValueError(
            f"Invalid shape of query, key, value or out: expected [tokens, key_heads, D] twice and [tokens, "
            f"n * key_heads, Dv] twice, got {list(query.shape)}, {list(key.shape)}, {list(value.shape)} and "
            f"{list(out.shape)}"
        )
    if decay.shape != (tokens, heads) or beta.shape != (tokens, heads):
        raise ValueError(
            f"Invalid shape of decay or beta: expected [{tokens}, {heads}] twice, got {list(decay.shape)} "
            f"and {list(beta.shape)}"
        )
    spans = len(begins)
    check_slots(states, (heads, dim, width), source, target, spans)
    check_last(query=query, key=key, value=value, out=out)
    dims = max(16, triton.next_power_of_2(dim))
    tile = min(32, max(16, triton.next_power_of_2(width)))
    parts = PARTS if longest is None else triton.cdiv(longest, CHUNK)
    if not spans or not out.numel() or not parts:
        return out
    at_once = min(spans, AT_ONCE)
    chunks = tokens // CHUNK + spans + 1
    inverse = torch.empty((chunks, heads, CHUNK, CHUNK), dtype=torch.float32, device=key.device)
    precision = "tf32x3" if key.is_cuda else "ieee"
    shape = {"D": dim, "DIMS": dims, "CHUNK": CHUNK, "HEADS": heads, "GROUP": heads // key_heads}
    shape |= {"L2NORM": l2norm, "EPS": EPS, "PRECISION": precision}
    launch(
        _invert, (parts, heads, at_once),
        inverse, key, decay, beta, begins, ends, *key.stride()[:2], *decay.stride(), *beta.stride(), spans,
        least, **shape, num_warps=4,
    )  # fmt: skip
    launch(
        _delta_spans, (triton.cdiv(width, tile), heads, at_once),
        out, query, key, value, decay, beta, inverse, states, source, target, begins, ends, *out.stride()[:2],
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *decay.stride(), *beta.stride(),
        states.stride(0), spans, least, dim**-0.5,
        **shape, WIDTH=width, TILE=tile, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


@triton.jit
def _tokens_of(X, token, stride, offset, channel, real, NORM: tl.constexpr, EPS: tl.constexpr):
    """Rows [CHUNK, DIMS] of X in fp32, normalised if wanted."""
    x = tl.load(X + token[:, None] * stride + offset + channel[None, :], mask=real, other=0.0).to(tl.float32)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]
    return x


@triton.jit
def _gates_of(DECAY, BETA, token, head, decay_token, decay_head, beta_token, beta_head, here):
    """The sums of decays up to each token of a chunk, and beta."""
    decay = tl.load(DECAY + token * decay_token + head * decay_head, mask=here, other=0.0).to(tl.float32)
    beta = tl.load(BETA + token * beta_token + head * beta_head, mask=here, other=0.0).to(tl.float32)
    return tl.cumsum(decay, 0), beta


@triton.jit(do_not_specialize=["spans", "least"])
def _invert(
    INVERSE, K, DECAY, BETA, BEGINS, ENDS, k_token, k_head, decay_token, decay_head, beta_token, beta_head,
    spans, least,
    D: tl.constexpr, DIMS: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    L2NORM: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """INVERSE [chunks, HEADS, CHUNK, CHUNK]: (1 + A)^-1 of each chunk, where A[i, j] = beta_i (k_i k_j)
    exp(decay from j to i) below the diagonal. Chunk c of span i has the place c + begins[i] / CHUNK + i, and
    no other has it.
    """
    for span in range(tl.program_id(2), spans, tl.num_programs(2)):
        first = tl.load(BEGINS + span)
        end = tl.load(ENDS + span)
        begin = first + tl.program_id(0) * CHUNK
        if end - first < least:
            begin = end
        while begin < end:
            at = ((begin - first) // CHUNK + first // CHUNK + span).to(tl.int64)
            _invert_one(
                INVERSE, K, DECAY, BETA, begin, end, at, tl.program_id(1),
                k_token, k_head, decay_token, decay_head, beta_token, beta_head,
                D, DIMS, CHUNK, HEADS, GROUP, L2NORM, EPS, PRECISION,
            )  # fmt: skip
            begin += tl.num_programs(0) * CHUNK


@triton.jit
def _invert_one(
    INVERSE, K, DECAY, BETA, begin, end, at, head,
    k_token, k_head, decay_token, decay_head, beta_token, beta_head,
    D: tl.constexpr, DIMS: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    L2NORM: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inverse of the chunk that begins there, at a place."""
    place = tl.arange(0, CHUNK)
    channel = tl.arange(0, DIMS)
    token = begin + place
    here = token < end
    real = here[:, None] & (channel < D)[None, :]
    k = _tokens_of(K, token, k_token, head // GROUP * k_head, channel, real, L2NORM, EPS)
    sums, beta = _gates_of(DECAY, BETA, token, head, decay_token, decay_head, beta_token, beta_head, here)
    below = place[:, None] > place[None, :]
    fade = tl.exp(tl.where(below, sums[:, None] - sums[None, :], 0.0))
    a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * fade * beta[:, None]
    a = tl.where(below, a, 0.0)
    x = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    for i in range(1, CHUNK):
        row = tl.sum(tl.where(place[:, None] == i, a, 0.0), 0)
        change = tl.sum(row[:, None] * x, 0)
        x = tl.where(place[:, None] == i, x - change[None, :], x)
    at = (at * HEADS + head) * CHUNK * CHUNK
    tl.store(INVERSE + at + place[:, None] * CHUNK + place[None, :], x)


@triton.jit(do_not_specialize=["spans", "least", "scale"])
def _delta_spans(
    OUT, Q, K, V, DECAY, BETA, INVERSE, STATES, SOURCE, TARGET, BEGINS, ENDS, out_token, out_head,
    q_token, q_head, k_token, k_head, v_token, v_head, decay_token, decay_head, beta_token, beta_head,
    state_stride, spans, least, scale,
    D: tl.constexpr, DIMS: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    L2NORM: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A program takes TILE columns of the states of one head through the chunks of spans."""
    head = tl.program_id(1)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, DIMS)
    place = tl.arange(0, CHUNK)
    wide = column < WIDTH
    inside = (head * D + channel)[:, None] * WIDTH + column[None, :]
    whole = (channel < D)[:, None] & wide[None, :]
    shared = head // GROUP
    upto = place[:, None] >= place[None, :]
    for span in range(tl.program_id(2), spans, tl.num_programs(2)):
        begin = tl.load(BEGINS + span)
        end = tl.load(ENDS + span)
        if end - begin >= least:
            at = ((begin // CHUNK + span).to(tl.int64) * HEADS + head) * CHUNK * CHUNK
            state = read_state(STATES, SOURCE, span, state_stride, inside, whole)
            while begin < end:
                token = begin + place
                here = token < end
                real = here[:, None] & (channel < D)[None, :]
                k = _tokens_of(K, token, k_token, shared * k_head, channel, real, L2NORM, EPS)
                q = _tokens_of(Q, token, q_token, shared * q_head, channel, real, L2NORM, EPS) * scale
                sums, beta = _gates_of(
                    DECAY, BETA, token, head, decay_token, decay_head, beta_token, beta_head, here
                )
                faded = tl.exp(sums)
                each = here[:, None] & wide[None, :]
                v = tl.load(
                    V + token[:, None] * v_token + head * v_head + column[None, :], mask=each, other=0.0
                )
                known = tl.dot(k, state, input_precision=PRECISION) * faded[:, None]
                inverse = tl.load(INVERSE + at + place[:, None] * CHUNK + place[None, :])
                delta = tl.dot(inverse, (v.to(tl.float32) - known) * beta[:, None], input_precision=PRECISION)
                pairs = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                fade = tl.exp(tl.where(upto, sums[:, None] - sums[None, :], 0.0))
                pairs = tl.where(upto, pairs * fade, 0.0)
                y = tl.dot(q, state, input_precision=PRECISION) * faded[:, None]
                y += tl.dot(pairs, delta, input_precision=PRECISION)
                tl.store(
                    OUT + token[:, None] * out_token + head * out_head + column[None, :],
                    y.to(OUT.dtype.element_ty), mask=each,
                )  # fmt: skip
                last = tl.sum(
                    tl.where(place == CHUNK - 1, sums, 0.0), 0
                )  # tokens behind the end do not decay
                k *= tl.exp(last - sums)[:, None]
                state = state * tl.exp(last) + tl.dot(tl.trans(k), delta, input_precision=PRECISION)
                begin += CHUNK
                at += HEADS * CHUNK * CHUNK
            write_state(STATES, TARGET, span, state_stride, inside, whole, state)
