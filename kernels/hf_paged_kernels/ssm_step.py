"""One token of Mamba-2's selective scan, by slots of its state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import exact
from .launching import launch
from .slots import check_last, check_slots, read_state, write_state
from .tuning import state_tiling

ANY_TIME = (0.0, float("inf"))


def ssm_step(
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
    limit: tuple[float, float] = ANY_TIME,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """S' = S * exp(t * A) + (t * B) x, and the answer S' C + x * D, with t = dt + dt_bias, or
    softplus(dt + dt_bias), times silu(gate) if there is one. Rounded as transformers rounds: t and both
    products to dt's, B's and x's dtypes, S' to C's for the answer.

    x and gate [rows, heads, P], B and C [rows, groups, N], each with the last stride 1; groups divide heads,
    and consecutive heads share one; dt [rows, heads]; A, D and dt_bias [heads], D, dt_bias and gate or None;
    states [slots, heads, P, N], each without gaps; source and target [rows], int64: the slot that a row
    reads, -1 for no past (zeros), and the slot that it writes, -1 for none. No row may write what another row
    reads. limit: of t in rows without a past, which begin a prompt. The answer is [rows, heads, P] in x's
    dtype, `out` if given. spans: where the tokens of each row begin and end, whole numbers [rows]; rows of
    one token are computed, at its place among the tokens of x, dt, B, C, gate and out.
    """
    tokens, heads, width = x.shape
    rows = tokens if spans is None else len(spans[0])
    groups, dim = B.shape[1:]
    check_heads(x, dt, A, B, C, D, dt_bias)
    check_slots(states, (heads, width, dim), source, target, rows)
    z = x if gate is None else gate
    if z.shape != x.shape:
        raise ValueError(f"Invalid shape of gate: expected {list(x.shape)}, got {list(z.shape)}")
    check_last(x=x, B=B, C=C, gate=z)
    if out is None:
        out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    dims = triton.next_power_of_2(dim)
    tile, warps = state_tiling(rows * heads, dims, triton.next_power_of_2(width))
    if out.numel():
        skip = A if D is None else D
        bias = A if dt_bias is None else dt_bias
        launch(
            _ssm_step, (triton.cdiv(width, tile), heads, rows),
            out, x, dt, A, B, C, skip, bias, z, states, source, target, *(spans or (source, source)),
            *x.stride()[:2], *dt.stride(), A.stride(0), *B.stride()[:2], *C.stride()[:2],
            skip.stride(0), bias.stride(0), *z.stride()[:2], states.stride(0), *limit,
            HEADS=heads, GROUP=heads // groups, N=dim, DIMS=dims, WIDTH=width, TILE=tile,
            SKIP=D is not None, BIAS=dt_bias is not None, GATE=gate is not None, SOFTPLUS=softplus,
            SPANS=spans is not None, EXACT=x.device.type != "cpu", num_warps=warps,
        )  # fmt: skip
    return out


def check_heads(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> None:
    """Raise unless these are of the tokens and heads of x [tokens, heads, P]."""
    tokens, heads, _ = x.shape
    if B.ndim != 3 or len(B) != tokens or C.shape != B.shape or heads % B.shape[1]:
        raise ValueError(
            f"Invalid shape of B or C: expected [{tokens}, groups, N] for {heads} heads, got {list(B.shape)} "
            f"and {list(C.shape)}"
        )
    if dt.shape != (tokens, heads) or any(
        each.shape != (heads,) for each in (A, D, dt_bias) if each is not None
    ):
        raise ValueError(
            f"Invalid shape of dt, A, D or dt_bias: expected [{tokens}, {heads}] and [{heads}], got "
            f"{[None if each is None else list(each.shape) for each in (dt, A, D, dt_bias)]}"
        )


@triton.jit(do_not_specialize=["shortest", "longest"])
def _ssm_step(
    OUT, X, DT, A, B, C, D, DT_BIAS, Z, STATES, SOURCE, TARGET, BEGINS, ENDS,
    x_row, x_head, dt_row, dt_head, a_head, b_row, b_group, c_row, c_group, d_head, bias_head,
    z_row, z_head, state_stride, shortest, longest,
    HEADS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    SOFTPLUS: tl.constexpr, SPANS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """OUT, X [rows, HEADS, WIDTH]; B, C [rows, HEADS / GROUP, N]; STATES [slots, HEADS, WIDTH, N]. A program
    takes TILE lines of the state of one head and row.
    """
    row = tl.program_id(2).to(tl.int64)
    token = row
    if SPANS:
        token = tl.load(BEGINS + row)
        if tl.load(ENDS + row) - token != 1:
            return
    head = tl.program_id(1)
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, DIMS)
    here = line < WIDTH
    real = column < N
    both = here[:, None] & real[None, :]
    inside = (head * WIDTH + line)[:, None] * N + column[None, :]
    state = read_state(STATES, SOURCE, row, state_stride, inside, both)
    group = head // GROUP
    x = tl.load(X + token * x_row + head * x_head + line, mask=here, other=0.0)
    b = tl.load(B + token * b_row + group * b_group + column, mask=real, other=0.0)
    c = tl.load(C + token * c_row + group * c_group + column, mask=real, other=0.0)
    t = tl.load(DT + token * dt_row + head * dt_head)
    time = t.to(tl.float32)
    if BIAS:
        bias = tl.load(DT_BIAS + head * bias_head).to(t.dtype)
        time = (time + bias.to(tl.float32)).to(t.dtype).to(tl.float32)
    if SOFTPLUS:
        time = exact.softplus(time, EXACT).to(t.dtype).to(tl.float32)
    if SPANS:
        within = tl.minimum(tl.maximum(time, shortest), longest).to(t.dtype).to(tl.float32)
        time = tl.where(tl.load(SOURCE + row) < 0, within, time)
    state *= tl.exp(time * tl.load(A + head * a_head).to(tl.float32))
    added = (time * b.to(tl.float32)).to(b.dtype).to(tl.float32)
    added = (added[None, :] * x.to(tl.float32)[:, None]).to(x.dtype).to(tl.float32)
    state += added
    write_state(STATES, TARGET, row, state_stride, inside, both, state)
    y = tl.sum(state.to(c.dtype).to(tl.float32) * c.to(tl.float32)[None, :], 1).to(c.dtype).to(tl.float32)
    if SKIP:
        skipped = tl.load(D + head * d_head)
        y += x.to(tl.float32) * skipped.to(tl.float32)
    if GATE:
        z = tl.load(Z + token * z_row + head * z_head + line, mask=here, other=0.0)
        y = y.to(c.dtype).to(tl.float32) * exact.silu(z.to(tl.float32), EXACT).to(z.dtype).to(tl.float32)
    tl.store(OUT + (token * HEADS + head) * WIDTH + line, y.to(OUT.dtype.element_ty), mask=here)
