"""One token of a causal convolution, by slots of its state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import exact
from .launching import launch
from .slots import check_last, check_slots, read_state, write_state

TILE = 256
"""Channels of a program."""
ACTIVATIONS = (None, "silu")


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    activation: str | None = None,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(sum_j weight[c, j] * window[c, j] + bias[c]), the window being the last k - 1 inputs in the
    state and x. The sum is taken in fp32 and rounded to weight's dtype before the activation.

    x [rows, C], any strides; weight [C, k]; bias [C] or None; states [slots, C, k], each without gaps: the
    last k inputs; source and target [rows], int64: the slot that a row reads, -1 for no past (zeros), and the
    slot that it writes, -1 for none. No row may write what another row reads. The answer is [rows, C] in x's
    dtype, `out` if given. spans: where the tokens of each row begin and end, whole numbers [rows]; rows of
    one token are computed, at its place in x and out.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"Invalid activation {activation!r}: expected one of {ACTIVATIONS}")
    tokens, channels = x.shape
    rows = tokens if spans is None else len(spans[0])
    taps = weight.shape[-1]
    if weight.shape != (channels, taps) or not weight.is_contiguous():
        raise ValueError(
            f"Invalid shape of weight: expected [{channels}, k] without gaps, got {list(weight.shape)}"
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"Invalid shape of bias: expected [{channels}], got {list(bias.shape)}")
    check_slots(states, (channels, taps), source, target, rows)
    if bias is not None:
        check_last(bias=bias)
    if out is None:
        out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if out.numel():
        launch(
            _conv_step, (rows, triton.cdiv(channels, TILE)),
            out, x, weight, weight if bias is None else bias, states, source, target,
            *(spans or (source, source)), *x.stride(), states.stride(0),
            C=channels, K=taps, TAPS=triton.next_power_of_2(taps), TILE=TILE, BIAS=bias is not None,
            SPANS=spans is not None, SILU=activation == "silu", EXACT=x.device.type != "cpu", num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _conv_step(
    OUT, X, WEIGHT, BIASES, STATES, SOURCE, TARGET, BEGINS, ENDS, x_row, x_channel, state_stride,
    C: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr,
    SPANS: tl.constexpr, SILU: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """OUT [rows, C]; X [rows, C]; WEIGHT [C, K]; STATES [slots, C, K]. A program takes TILE channels.

    The window is the state without its first input, and X: it is what the row writes.
    """
    row = tl.program_id(0).to(tl.int64)
    token = row
    if SPANS:
        token = tl.load(BEGINS + row)
        if tl.load(ENDS + row) - token != 1:
            return
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tap = tl.arange(0, TAPS)[None, :]
    here = channel < C
    x = tl.load(X + token * x_row + channel.to(tl.int64) * x_channel, mask=here, other=0.0)
    inside = channel[:, None] * K + tap
    past = read_state(STATES, SOURCE, row, state_stride, inside + 1, here[:, None] & (tap < K - 1))
    dtype = WEIGHT.dtype.element_ty
    window = tl.where(tap == K - 1, x.to(tl.float32)[:, None], past).to(dtype).to(tl.float32)
    real = here[:, None] & (tap < K)
    tl.debug_barrier()  # a row may write where it reads, one input further on: all threads have read by now
    write_state(STATES, TARGET, row, state_stride, inside, real, window)
    weight = tl.load(WEIGHT + inside, mask=real, other=0.0).to(tl.float32)
    y = tl.sum(tl.where(real, window * weight, 0.0), 1)
    if BIAS:
        y += tl.load(BIASES + channel, mask=here, other=0.0).to(tl.float32)
    y = y.to(dtype)
    if SILU:
        y = exact.silu(y.to(tl.float32), EXACT).to(dtype)
    tl.store(OUT + token * C + channel, y.to(OUT.dtype.element_ty), mask=here)
