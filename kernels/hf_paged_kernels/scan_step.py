"""One token of Mamba's selective scan, by slots of its state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import exact
from .launching import launch
from .slots import check_last, check_slots, read_state, write_state
from .tuning import state_tiling


def scan_step(
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
    *,
    gate: torch.Tensor | None = None,
    softplus: bool = False,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """S' = S * exp(t * A) + (t * B) x, and the answer S' C + x * D, with t = dt + dt_bias, or
    softplus(dt + dt_bias), times silu(gate) if there is one. Rounded as transformers rounds: t to dt's dtype,
    S' to C's for the answer.

    x, dt and gate [rows, channels], B and C [rows, N], A [channels, N], each with the last stride 1; D and
    dt_bias [channels], D, dt_bias and gate or None; states [slots, channels, N], each without gaps; source
    and target [rows], int64: the slot that a row reads, -1 for no past (zeros), and the slot that it writes,
    -1 for none. No row may write what another row reads. The answer is [rows, channels] in x's dtype, `out`
    if given. spans: where the tokens of each row begin and end, whole numbers [rows]; rows of one token are
    computed, at its place among the tokens of x, dt, B, C, gate and out.
    """
    tokens, channels = x.shape
    rows = tokens if spans is None else len(spans[0])
    dim = B.shape[-1]
    z, skip, bias = check_channels(x, dt, A, B, C, D, dt_bias, gate)
    check_slots(states, (channels, dim), source, target, rows)
    if out is None:
        out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    dims = triton.next_power_of_2(dim)
    tile, warps = state_tiling(rows, dims, triton.next_power_of_2(channels))
    if out.numel():
        launch(
            _scan_step, (triton.cdiv(channels, tile), rows),
            out, x, dt, A, B, C, skip, bias, z, states, source, target, *(spans or (source, source)),
            x.stride(0), dt.stride(0), A.stride(0), B.stride(0), C.stride(0), skip.stride(0), bias.stride(0),
            z.stride(0), states.stride(0),
            CHANNELS=channels, N=dim, DIMS=dims, TILE=tile, SKIP=D is not None, BIAS=dt_bias is not None,
            GATE=gate is not None, SOFTPLUS=softplus, SPANS=spans is not None,
            EXACT=x.device.type != "cpu", num_warps=warps,
        )  # fmt: skip
    return out


def check_channels(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    gate: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gate, D and dt_bias that a kernel reads; raises unless all are of the tokens and channels of x."""
    tokens, channels = x.shape
    dim = B.shape[-1]
    if B.shape != (tokens, dim) or C.shape != B.shape or A.shape != (channels, dim):
        raise ValueError(
            f"Invalid shape of A, B or C: expected [{channels}, N] and twice [{tokens}, N], got "
            f"{list(A.shape)}, {list(B.shape)} and {list(C.shape)}"
        )
    z = x if gate is None else gate
    skip = A[:, 0] if D is None else D
    bias = A[:, 0] if dt_bias is None else dt_bias
    if not (dt.shape == z.shape == x.shape and skip.shape == bias.shape == (channels,)):
        raise ValueError(
            f"Invalid shape of dt, gate, D or dt_bias: expected twice [{tokens}, {channels}] and twice "
            f"[{channels}], got {[list(each.shape) for each in (dt, z, skip, bias)]}"
        )
    check_last(x=x, dt=dt, A=A, B=B, C=C, gate=z)
    return z, skip, bias


@triton.jit
def time_of(t, bias, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, EXACT: tl.constexpr):
    """The time that channels take at a token, rounded to its dtype."""
    time = t.to(tl.float32)
    if BIAS:
        time = (time + bias.to(t.dtype).to(tl.float32)).to(t.dtype).to(tl.float32)
    if SOFTPLUS:
        time = exact.softplus(time, EXACT).to(t.dtype).to(tl.float32)
    return time


@triton.jit
def advance(state, rate, time, x, b):
    """The state [channels, N] behind a token."""
    added = time[:, None] * b.to(tl.float32)[None, :] * x.to(tl.float32)[:, None]
    return state * tl.exp(time[:, None] * rate) + added


@triton.jit
def product(state, c):
    """The sums of states [channels, N] weighted by c, rounded to its dtype."""
    y = tl.sum(state.to(c.dtype).to(tl.float32) * c.to(tl.float32)[None, :], 1)
    return y.to(c.dtype).to(tl.float32)


@triton.jit
def answer(
    y, x, skip, z, DTYPE: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """The answer of channels: the state's, what skips it, and the gate."""
    if SKIP:
        y += x.to(tl.float32) * skip.to(tl.float32)
    if GATE:
        y = y.to(DTYPE).to(tl.float32) * exact.silu(z.to(tl.float32), EXACT).to(z.dtype).to(tl.float32)
    return y


@triton.jit
def _scan_step(
    OUT, X, DT, A, B, C, D, DT_BIAS, Z, STATES, SOURCE, TARGET, BEGINS, ENDS,
    x_row, dt_row, a_channel, b_row, c_row, d_channel, bias_channel, z_row, state_stride,
    CHANNELS: tl.constexpr, N: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, SKIP: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, SOFTPLUS: tl.constexpr, SPANS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """OUT, X, DT, Z [rows, CHANNELS]; B, C [rows, N]; A [CHANNELS, N]; STATES [slots, CHANNELS, N]. A program
    takes TILE channels of a row.
    """
    row = tl.program_id(1).to(tl.int64)
    token = row
    if SPANS:
        token = tl.load(BEGINS + row)
        if tl.load(ENDS + row) - token != 1:
            return
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, DIMS)
    here = channel < CHANNELS
    real = column < N
    both = here[:, None] & real[None, :]
    inside = channel[:, None] * N + column[None, :]
    state = read_state(STATES, SOURCE, row, state_stride, inside, both)
    x = tl.load(X + token * x_row + channel, mask=here, other=0.0)
    b = tl.load(B + token * b_row + column, mask=real, other=0.0)
    c = tl.load(C + token * c_row + column, mask=real, other=0.0)
    rate = tl.load(A + channel[:, None] * a_channel + column[None, :], mask=both, other=0.0).to(tl.float32)
    t = tl.load(DT + token * dt_row + channel, mask=here, other=0.0)
    z = tl.load(Z + token * z_row + channel, mask=here, other=0.0)
    bias = tl.load(DT_BIAS + channel * bias_channel, mask=here, other=0.0)
    skip = tl.load(D + channel * d_channel, mask=here, other=0.0)
    state = advance(state, rate, time_of(t, bias, BIAS, SOFTPLUS, EXACT), x, b)
    write_state(STATES, TARGET, row, state_stride, inside, both, state)
    y = answer(product(state, c), x, skip, z, c.dtype, SKIP, GATE, EXACT)
    tl.store(OUT + token * CHANNELS + channel, y.to(OUT.dtype.element_ty), mask=here)
