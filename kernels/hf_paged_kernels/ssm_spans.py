"""Several tokens of Mamba-2's selective scan, by slots of its state.

Within a chunk the scan is attention with weights that fade; the state carries what is before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import exact
from .launching import launch
from .slots import check_last, check_slots, read_state, write_state
from .spans import AT_ONCE, CHUNK, LEAST, dot, nth_span, precision_of
from .ssm_step import ANY_TIME, check_heads

WIDEST_IN_HALVES = 128
"""The most columns of a state that is multiplied as bf16: with 256, Triton 3.6 gives wrong numbers."""


def ssm_spans(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    states: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    *,
    softplus: bool = False,
    limit: tuple[float, float] = ANY_TIME,
    least: int = 1,
) -> torch.Tensor:
    """Mamba-2's scan (`ssm_step`, without a gate) over spans of tokens, each behind the state in a slot. The
    time t is within `limit`, and what comes behind it is computed in fp32, as transformers does.

    x [tokens, heads, P], B and C [tokens, groups, N], each with the last stride 1; dt [tokens, heads]; A, D
    and dt_bias [heads], D and dt_bias or None; states [slots, heads, P, N]; source and target [spans], int64;
    begins and ends [spans], whole numbers: a span is the tokens from begins[i] to ends[i]; those of fewer
    than `least` are left out. A span may write the slot that it reads. The answers are written to these
    tokens of out [tokens, heads, P].
    """
    heads, width = x.shape[1:]
    groups, dim = B.shape[1:]
    check_heads(x, dt, A, B, C, D, dt_bias)
    spans = len(begins)
    check_slots(states, (heads, width, dim), source, target, spans)
    if out.shape != x.shape:
        raise ValueError(f"Invalid shape of out: expected {list(x.shape)}, got {list(out.shape)}")
    check_last(x=x, B=B, C=C, out=out)
    tile = LEAST
    dims = max(LEAST, triton.next_power_of_2(dim))
    halves = x.dtype == torch.bfloat16 and dims <= WIDEST_IN_HALVES
    skip = A if D is None else D
    bias = A if dt_bias is None else dt_bias
    if spans and out.numel():
        launch(
            _ssm_spans, (triton.cdiv(width, tile), heads, min(spans, AT_ONCE)),
            out, x, dt, A, B, C, skip, bias, states, source, target, begins, ends,
            *out.stride()[:2], *x.stride()[:2], *dt.stride(), A.stride(0), *B.stride()[:2], *C.stride()[:2],
            skip.stride(0), bias.stride(0), states.stride(0), spans, least, *limit,
            GROUP=heads // groups, N=dim, DIMS=dims, WIDTH=width, TILE=tile,
            CHUNK=CHUNK, SKIP=D is not None, BIAS=dt_bias is not None, SOFTPLUS=softplus,
            EXACT=x.device.type != "cpu", PRECISION=precision_of(x, halves),
            num_warps=4 if halves else 8, num_stages=2 if halves else 1,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["spans", "least", "shortest", "longest"])
def _ssm_spans(
    OUT, X, DT, A, B, C, D, DT_BIAS, STATES, SOURCE, TARGET, BEGINS, ENDS,
    out_token, out_head, x_token, x_head, dt_token, dt_head, a_head, b_token, b_group, c_token, c_group,
    d_head, bias_head, state_stride, spans, least, shortest, longest,
    GROUP: tl.constexpr, N: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program takes TILE lines of the state of one head through the chunks of spans. It holds them as
    columns [DIMS, TILE].
    """
    head = tl.program_id(1)
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, DIMS)
    place = tl.arange(0, CHUNK)
    wide = line < WIDTH
    real = column < N
    whole = real[:, None] & wide[None, :]
    inside = (head * WIDTH + line)[None, :] * N + column[:, None]
    group = head // GROUP
    upto = place[:, None] >= place[None, :]
    rate = tl.load(A + head * a_head).to(tl.float32)
    number = tl.program_id(2)
    span = nth_span(BEGINS, ENDS, spans, least, number)
    while span >= 0:
        end = tl.load(ENDS + span)
        state = read_state(STATES, SOURCE, span, state_stride, inside, whole)
        for begin in range(tl.load(BEGINS + span), end, CHUNK):
            token = begin + place
            here = token < end
            t = tl.load(DT + token * dt_token + head * dt_head, mask=here, other=0.0)
            time = t.to(tl.float32)
            if BIAS:
                bias = tl.load(DT_BIAS + head * bias_head).to(t.dtype)
                time = (time + bias.to(tl.float32)).to(t.dtype).to(tl.float32)
            if SOFTPLUS:
                time = exact.softplus(time, EXACT).to(t.dtype).to(tl.float32)
            time = tl.minimum(tl.maximum(time, shortest), longest).to(t.dtype).to(tl.float32)
            time = tl.where(here, time, 0.0)  # tokens behind the end take none
            tokens = here[:, None] & real[None, :]
            b = tl.load(
                B + token[:, None] * b_token + group * b_group + column[None, :], mask=tokens, other=0.0
            )
            c = tl.load(
                C + token[:, None] * c_token + group * c_group + column[None, :], mask=tokens, other=0.0
            )
            each = here[:, None] & wide[None, :]
            x = tl.load(X + token[:, None] * x_token + head * x_head + line[None, :], mask=each, other=0.0)
            sums = tl.cumsum(time * rate, 0)
            fade = tl.exp(tl.where(upto, sums[:, None] - sums[None, :], 0.0)) * time[None, :]
            pairs = tl.where(upto, dot(c, tl.trans(b), PRECISION) * fade, 0.0)
            y = dot(c, state, PRECISION) * tl.exp(sums)[:, None] + dot(pairs, x, PRECISION)
            if SKIP:
                y += x.to(tl.float32) * tl.load(D + head * d_head).to(tl.float32)
            tl.store(
                OUT + token[:, None] * out_token + head * out_head + line[None, :],
                y.to(OUT.dtype.element_ty), mask=each,
            )  # fmt: skip
            last = tl.sum(time * rate, 0)
            added = x.to(tl.float32) * (time * tl.exp(last - sums))[:, None]
            state = state * tl.exp(last) + dot(tl.trans(b), added, PRECISION)
        write_state(STATES, TARGET, span, state_stride, inside, whole, state)
        number += tl.num_programs(2)
        span = nth_span(BEGINS, ENDS, spans, least, number)
