"""Several tokens of Mamba's selective scan, by slots of its state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch
from .slots import check_last, check_slots, read_state, write_state
from .tuning import state_tiling


def scan_spans(
    x: torch.Tensor,
    times: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    states: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """S' = S * exp(t * A) + (t * B) x, and the answer S' C, over spans of tokens, each behind the state in a
    slot; S' is rounded to x's dtype for the answer.

    x and times [tokens, channels], B and C [tokens, N], A [channels, N], each with the last stride 1; states
    [slots, channels, N]; begins, ends, source and target [spans], int64: a span is the tokens from begins[i]
    to ends[i]. The answers are written to these tokens of out [tokens, channels].
    """
    tokens, channels = x.shape
    dim = B.shape[-1]
    if times.shape != x.shape or out.shape != x.shape:
        raise ValueError(
            f"Invalid shape of times or out: expected [{tokens}, {channels}] twice, got {list(times.shape)} "
            f"and {list(out.shape)}"
        )
    if B.shape != (tokens, dim) or C.shape != B.shape or A.shape != (channels, dim):
        raise ValueError(
            f"Invalid shape of A, B or C: expected [{channels}, N] and twice [{tokens}, N], got "
            f"{list(A.shape)}, {list(B.shape)} and {list(C.shape)}"
        )
    spans = len(begins)
    check_slots(states, (channels, dim), source, target, spans)
    check_last(x=x, times=times, A=A, B=B, C=C, out=out)
    dims = triton.next_power_of_2(dim)
    tile, warps = state_tiling(spans, dims, triton.next_power_of_2(channels))
    if spans and out.numel():
        launch(
            _scan_spans, (triton.cdiv(channels, tile), spans),
            out, x, times, A, B, C, states, source, target, begins, ends,
            out.stride(0), x.stride(0), times.stride(0), A.stride(0), B.stride(0), C.stride(0),
            states.stride(0), CHANNELS=channels, N=dim, DIMS=dims, TILE=tile, num_warps=warps,
        )  # fmt: skip
    return out


@triton.jit
def _scan_spans(
    OUT, X, TIMES, A, B, C, STATES, SOURCE, TARGET, BEGINS, ENDS,
    out_token, x_token, time_token, a_channel, b_token, c_token, state_stride,
    CHANNELS: tl.constexpr, N: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program takes TILE channels of a span, token by token."""
    span = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, DIMS)
    here = channel < CHANNELS
    real = column < N
    both = here[:, None] & real[None, :]
    inside = channel[:, None] * N + column[None, :]
    state = read_state(STATES, SOURCE, span, state_stride, inside, both)
    rate = tl.load(A + channel[:, None] * a_channel + column[None, :], mask=both, other=0.0).to(tl.float32)
    begin = tl.load(BEGINS + span)
    end = tl.load(ENDS + span)
    for token in range(begin, end):
        x = tl.load(X + token * x_token + channel, mask=here, other=0.0)
        time = tl.load(TIMES + token * time_token + channel, mask=here, other=0.0).to(tl.float32)
        b = tl.load(B + token * b_token + column, mask=real, other=0.0).to(tl.float32)
        c = tl.load(C + token * c_token + column, mask=real, other=0.0).to(tl.float32)
        added = time[:, None] * b[None, :] * x.to(tl.float32)[:, None]
        state = state * tl.exp(time[:, None] * rate) + added
        y = tl.sum(state.to(x.dtype).to(tl.float32) * c[None, :], 1)
        tl.store(OUT + token * out_token + channel, y.to(OUT.dtype.element_ty), mask=here)
    write_state(STATES, TARGET, span, state_stride, inside, both, state)
