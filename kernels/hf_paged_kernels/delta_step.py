"""One token of the gated delta rule, by slots of its state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch
from .slots import check_last, check_slots, read_state, write_state
from .tuning import state_tiling

EPS = 1e-6


def delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    l2norm: bool = False,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """S' = S * exp(decay) + k (beta * (v - k^T (S * exp(decay))))^T, and the answer q^T S' / sqrt(D).

    query and key [rows, key_heads, D], value [rows, heads, Dv], each with the last stride 1; key_heads divide
    heads, and groups of consecutive heads share one; decay [rows, heads], or [rows, heads, D] with the last
    stride 1; beta [rows, heads]; states [slots, heads, D, Dv], each without gaps; source and target [rows],
    int64: the slot that a row reads, -1 for no past (zeros), and the slot that it writes, -1 for none. No row
    may write what another row reads. l2norm: query and key are normalised first. All is computed in fp32. The
    answer is [rows, heads, Dv] in query's dtype, `out` if given. spans: where the tokens of each row begin
    and end, whole numbers [rows]; rows of one token are computed, at its place among the tokens of query,
    key, value, decay, beta and out.
    """
    tokens, key_heads, dim = key.shape
    heads, width = value.shape[1:]
    rows = tokens if spans is None else len(spans[0])
    if query.shape != key.shape or value.shape[0] != tokens or heads % key_heads:
        raise ValueError(
            f"Invalid shape of query, key or value: expected [rows, key_heads, D] twice and [rows, n * "
            f"key_heads, Dv], got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    by_channel = decay.ndim == 3
    wanted = (tokens, heads, dim) if by_channel else (tokens, heads)
    if decay.shape != wanted or beta.shape != (tokens, heads):
        raise ValueError(
            f"Invalid shape of decay or beta: expected [{tokens}, {heads}] or [{tokens}, {heads}, {dim}], "
            f"and [{tokens}, {heads}], got {list(decay.shape)} and {list(beta.shape)}"
        )
    check_slots(states, (heads, dim, width), source, target, rows)
    check_last(query=query, key=key, value=value)
    if by_channel:
        check_last(decay=decay)
    if out is None:
        out = torch.empty((tokens, heads, width), dtype=query.dtype, device=query.device)
    dims = triton.next_power_of_2(dim)
    tile, warps = state_tiling(rows * heads, dims, triton.next_power_of_2(width))
    if out.numel():
        launch(
            _delta_step, (triton.cdiv(width, tile), heads, rows),
            out, query, key, value, decay, beta, states, source, target, *(spans or (source, source)),
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *decay.stride()[:2], *beta.stride(),
            states.stride(0), dim**-0.5,
            HEADS=heads, GROUP=heads // key_heads, D=dim, DIMS=dims, WIDTH=width, TILE=tile,
            BY_CHANNEL=by_channel, SPANS=spans is not None, L2NORM=l2norm, EPS=EPS, num_warps=warps,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["scale"])
def _delta_step(
    OUT, Q, K, V, DECAY, BETA, STATES, SOURCE, TARGET, BEGINS, ENDS,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, beta_row, beta_head, state_stride,
    scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, BY_CHANNEL: tl.constexpr, SPANS: tl.constexpr, L2NORM: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """OUT [rows, HEADS, WIDTH]; Q, K [rows, HEADS / GROUP, D]; V [rows, HEADS, WIDTH]; STATES [slots, HEADS,
    D, WIDTH]. A program takes TILE columns of the state of one head and row.

    q^T S' is q^T (S * exp(decay)) + (q^T k) * delta: both sums over the state are taken at once.
    """
    row = tl.program_id(2).to(tl.int64)
    token = row
    if SPANS:
        token = tl.load(BEGINS + row)
        if tl.load(ENDS + row) - token != 1:
            return
    head = tl.program_id(1)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, DIMS)
    real = channel < D
    here = column < WIDTH
    both = real[:, None] & here[None, :]
    inside = (head * D + channel)[:, None] * WIDTH + column[None, :]
    state = read_state(STATES, SOURCE, row, state_stride, inside, both)
    if BY_CHANNEL:
        decay = tl.load(DECAY + token * decay_row + head * decay_head + channel, mask=real, other=0.0)
        state *= tl.exp(decay.to(tl.float32))[:, None]
    else:
        state *= tl.exp(tl.load(DECAY + token * decay_row + head * decay_head).to(tl.float32))
    beta = tl.load(BETA + token * beta_row + head * beta_head).to(tl.float32)
    shared = head // GROUP
    q = tl.load(Q + token * q_row + shared * q_head + channel, mask=real, other=0.0).to(tl.float32)
    k = tl.load(K + token * k_row + shared * k_head + channel, mask=real, other=0.0).to(tl.float32)
    v = tl.load(V + token * v_row + head * v_head + column, mask=here, other=0.0).to(tl.float32)
    if L2NORM:
        q *= tl.rsqrt(tl.sum(q * q, 0) + EPS)
        k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    q *= scale
    delta = (v - tl.sum(state * k[:, None], 0)) * beta
    y = tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * delta
    write_state(STATES, TARGET, row, state_stride, inside, both, state + k[:, None] * delta[None, :])
    tl.store(OUT + (token * HEADS + head) * WIDTH + column, y.to(OUT.dtype.element_ty), mask=here)
