"""Several tokens of a causal convolution, by slots of its state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import exact
from .conv_step import ACTIVATIONS
from .launching import launch
from .slots import check_slots, read_state, write_state
from .spans import AT_ONCE, nth_span

CHANNELS, TOKENS = 128, 8
"""Channels and tokens that a program takes at once."""
SHARE, PARTS = 64, 32
"""The tokens of a step for each program that shares those of a span, and the most such programs."""


def conv_spans(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    *,
    out: torch.Tensor,
    least: int = 1,
    activation: str | None = None,
) -> torch.Tensor:
    """The convolution of `conv_step` over spans of tokens, each behind the state in a slot.

    x [tokens, C], any strides; weight [C, k]; bias [C] or None; states [slots, C, k]; source and target
    [spans], int64; begins and ends [spans], whole numbers: a span is the tokens from begins[i] to ends[i];
    those of fewer than `least` are left out. A row may write the slot that it reads. The answers are written
    to these tokens of out [tokens, C].
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"Invalid activation {activation!r}: expected one of {ACTIVATIONS}")
    tokens, channels = x.shape
    taps = weight.shape[-1]
    if weight.shape != (channels, taps) or not weight.is_contiguous():
        raise ValueError(
            f"Invalid shape of weight: expected [{channels}, k] without gaps, got {list(weight.shape)}"
        )
    spans = len(begins)
    check_slots(states, (channels, taps), source, target, spans)
    if out.shape != x.shape or not out.is_contiguous():
        raise ValueError(
            f"Invalid shape of out: expected {list(x.shape)} without gaps, got {list(out.shape)}"
        )
    if not out.numel() or not spans:
        return out
    window = triton.next_power_of_2(taps)
    parts = min(PARTS, triton.cdiv(tokens, SHARE))
    launch(
        _conv_spans, (parts, triton.cdiv(channels, CHANNELS), min(spans, AT_ONCE)),
        out, x, weight, weight if bias is None else bias, states, source, target, begins, ends,
        *x.stride(), states.stride(0), spans, least,
        C=channels, K=taps, CHANNELS=CHANNELS, TOKENS=max(TOKENS, window), TAPS=window,
        BIAS=bias is not None, SILU=activation == "silu", EXACT=x.device.type != "cpu", num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["spans", "least"])
def _conv_spans(
    OUT, X, WEIGHT, BIASES, STATES, SOURCE, TARGET, BEGINS, ENDS, x_token, x_channel, state_stride,
    spans, least,
    C: tl.constexpr, K: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, TAPS: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """OUT [tokens, C]; X [tokens, C]; WEIGHT [C, K]; STATES [slots, C, K]. A program takes CHANNELS channels
    of spans, TOKENS tokens at a time. That of the first tokens alone reads states, and writes them after.
    """
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    part = tl.program_id(0)
    number = tl.program_id(2)
    span = nth_span(BEGINS, ENDS, spans, least, number)
    while span >= 0:
        first = tl.load(BEGINS + span)
        end = tl.load(ENDS + span)
        slot = tl.load(SOURCE + span)
        for begin in range(first + part * TOKENS, end, tl.num_programs(0) * TOKENS):
            if begin == first:
                _convolve(
                    OUT, X, WEIGHT, BIASES, STATES + slot * state_stride, begin, first, end, slot >= 0,
                    channel[None, :], x_token, x_channel, C, K, CHANNELS, TOKENS, True, BIAS, SILU, EXACT,
                )  # fmt: skip
            else:
                _convolve(
                    OUT, X, WEIGHT, BIASES, STATES, begin, first, end, False,
                    channel[None, :], x_token, x_channel, C, K, CHANNELS, TOKENS, False, BIAS, SILU, EXACT,
                )  # fmt: skip
        if part == 0:
            _leave_state(
                STATES, X, WEIGHT, SOURCE, TARGET, span, first, end, channel[:, None], x_token, x_channel,
                state_stride, C, K, TAPS,
            )  # fmt: skip
        number += tl.num_programs(2)
        span = nth_span(BEGINS, ENDS, spans, least, number)


@triton.jit
def _convolve(
    OUT, X, WEIGHT, BIASES, STATE, begin, first, end, has_past, channel, x_token, x_channel,
    C: tl.constexpr, K: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, FIRST: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens from `begin` on of a span, the FIRST ones behind the state STATE [C, K]; channel
    [1, CHANNELS].
    """
    dtype = WEIGHT.dtype.element_ty
    inside = channel < C
    token = (begin + tl.arange(0, TOKENS))[:, None]
    here = (token < end) & inside
    y = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(K):
        at = token - (K - 1 - tap)
        own = tl.load(
            X + at * x_token + channel.to(tl.int64) * x_channel, mask=here & (at >= first), other=0.0
        )
        each = own.to(tl.float32)
        if FIRST:  # inputs before the first lie at the end of the state
            before = tl.load(
                STATE + channel * K + (K + at - first), mask=here & (at < first) & has_past, other=0.0
            )
            each = tl.where(at >= first, each, before.to(tl.float32))
        weight = tl.load(WEIGHT + channel * K + tap, mask=inside, other=0.0).to(tl.float32)
        y += each.to(dtype).to(tl.float32) * weight
    if BIAS:
        y += tl.load(BIASES + channel, mask=inside, other=0.0).to(tl.float32)
    y = y.to(dtype)
    if SILU:
        y = exact.silu(y.to(tl.float32), EXACT).to(dtype)
    tl.store(OUT + token * C + channel, y.to(OUT.dtype.element_ty), mask=here)


@triton.jit
def _leave_state(
    STATES, X, WEIGHT, SOURCE, TARGET, span, first, end, channel, x_token, x_channel, state_stride,
    C: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The last K inputs of a span, of which the first may lie in the state that it reads."""
    tap = tl.arange(0, TAPS)[None, :]
    inside = (channel < C) & (tap < K)
    at = end - K + tap
    own = tl.load(X + at * x_token + channel.to(tl.int64) * x_channel, mask=inside & (at >= first), other=0.0)
    held = channel * K + (K + at - first)
    before = read_state(STATES, SOURCE, span, state_stride, held, inside & (at < first))
    new = tl.where(at >= first, own.to(tl.float32), before).to(WEIGHT.dtype.element_ty)
    tl.debug_barrier()  # a span may write where it reads
    write_state(STATES, TARGET, span, state_stride, channel * K + tap, inside, new.to(tl.float32))
