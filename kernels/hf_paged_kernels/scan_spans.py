"""Several tokens of Mamba's selective scan, by slots of its state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch
from .scan_step import advance, answer, check_channels, product, time_of
from .slots import check_last, check_slots, read_state, write_state
from .spans import AT_ONCE, nth_span
from .tuning import state_tiling


def scan_spans(
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
    gate: torch.Tensor | None = None,
    softplus: bool = False,
    least: int = 1,
) -> torch.Tensor:
    """Mamba's scan (`scan_step`) over spans of tokens, each behind the state in a slot.

    x, dt and gate [tokens, channels], B and C [tokens, N], A [channels, N], each with the last stride 1; D
    and dt_bias [channels], D, dt_bias and gate or None; states [slots, channels, N]; source and target
    [spans], int64; begins and ends [spans], whole numbers: a span is the tokens from begins[i] to ends[i];
    those of fewer than `least` are left out. A span may write the slot that it reads. The answers are written
    to these tokens of out [tokens, channels].
    """
    channels = x.shape[1]
    dim = B.shape[-1]
    if out.shape != x.shape:
        raise ValueError(f"Invalid shape of out: expected {list(x.shape)}, got {list(out.shape)}")
    z, skip, bias = check_channels(x, dt, A, B, C, D, dt_bias, gate)
    spans = len(begins)
    check_slots(states, (channels, dim), source, target, spans)
    check_last(out=out)
    at_once = min(spans, AT_ONCE)
    dims = triton.next_power_of_2(dim)
    tile, warps = state_tiling(1, dims, triton.next_power_of_2(channels))  # often there is one long span
    if spans and out.numel():
        launch(
            _scan_spans, (triton.cdiv(channels, tile), at_once),
            out, x, dt, A, B, C, skip, bias, z, states, source, target, begins, ends,
            out.stride(0), x.stride(0), dt.stride(0), A.stride(0), B.stride(0), C.stride(0), skip.stride(0),
            bias.stride(0), z.stride(0), states.stride(0), spans, least,
            CHANNELS=channels, N=dim, DIMS=dims, TILE=tile, SKIP=D is not None, BIAS=dt_bias is not None,
            GATE=gate is not None, SOFTPLUS=softplus, EXACT=x.device.type != "cpu", num_warps=warps,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["spans", "least"])
def _scan_spans(
    OUT, X, DT, A, B, C, D, DT_BIAS, Z, STATES, SOURCE, TARGET, BEGINS, ENDS,
    out_token, x_token, dt_token, a_channel, b_token, c_token, d_channel, bias_channel, z_token, state_stride,
    spans, least,
    CHANNELS: tl.constexpr, N: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, SKIP: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, SOFTPLUS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A program takes TILE channels of spans, token by token. Four tokens are loaded at once, so that loads
    do not wait for the answers before them.
    """
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, DIMS)
    two = tl.arange(0, 2)
    here = channel < CHANNELS
    real = column < N
    both = here[:, None] & real[None, :]
    inside = channel[:, None] * N + column[None, :]
    rate = tl.load(A + channel[:, None] * a_channel + column[None, :], mask=both, other=0.0).to(tl.float32)
    bias = tl.load(DT_BIAS + channel * bias_channel, mask=here, other=0.0)[:, None, None]
    skip = tl.load(D + channel * d_channel, mask=here, other=0.0)[:, None, None]
    number = tl.program_id(1)
    span = nth_span(BEGINS, ENDS, spans, least, number)
    while span >= 0:
        end = tl.load(ENDS + span)
        state = read_state(STATES, SOURCE, span, state_stride, inside, both)
        for begin in range(tl.load(BEGINS + span), end, 4):
            token = begin + 2 * two[None, :, None] + two[None, None, :]
            wide = here[:, None, None] & (token < end)
            deep = real[:, None, None] & (token < end)
            x = tl.load(X + token * x_token + channel[:, None, None], mask=wide, other=0.0)
            t = tl.load(DT + token * dt_token + channel[:, None, None], mask=wide, other=0.0)
            z = tl.load(Z + token * z_token + channel[:, None, None], mask=wide, other=0.0)
            b = tl.load(B + token * b_token + column[:, None, None], mask=deep, other=0.0)
            c = tl.load(C + token * c_token + column[:, None, None], mask=deep, other=0.0)
            time = tl.where(wide, time_of(t, bias, BIAS, SOFTPLUS, EXACT), 0.0)
            x0, x1, x2, x3 = _four(x)
            t0, t1, t2, t3 = _four(time)
            b0, b1, b2, b3 = _four(b)
            c0, c1, c2, c3 = _four(c)
            state = advance(state, rate, t0, x0, b0)
            y0 = product(state, c0)
            state = advance(state, rate, t1, x1, b1)
            y1 = product(state, c1)
            state = advance(state, rate, t2, x2, b2)
            y2 = product(state, c2)
            state = advance(state, rate, t3, x3, b3)
            y3 = product(state, c3)
            y = tl.join(tl.join(y0, y2), tl.join(y1, y3))
            y = answer(y, x, skip, z, c.dtype, SKIP, GATE, EXACT)
            at = token * out_token + channel[:, None, None]
            tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=wide)
        write_state(STATES, TARGET, span, state_stride, inside, both, state)
        number += tl.num_programs(1)
        span = nth_span(BEGINS, ENDS, spans, least, number)


@triton.jit
def _four(x):
    """The parts [n] of x [n, 2, 2]."""
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
