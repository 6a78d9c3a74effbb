"""One token of each row through convolutions and recurrences, by slots of their states, in plain torch: what
the kernels of the same names are held to.

States [slots, ...] are those of one layer. source and target [rows], int64, are the slot that each row reads,
-1 for no past, and the slot that it writes, -1 for none. No row may write what another row reads.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """One token x [rows, C] of a causal convolution; weight [C, k], bias [C], states [slots, C, k]."""
    inputs = torch.cat([read(states, source), x.unsqueeze(-1)], -1).to(weight.dtype)
    window = inputs[..., 1:]
    out = F.conv1d(window, weight.unsqueeze(1), bias, groups=x.shape[1])[..., 0]
    write(states, target, window)
    return (out if activation is None else F.silu(out)).to(x.dtype)


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
) -> torch.Tensor:
    """One token of the gated delta rule; query and key [rows, key_heads, D], value [rows, heads, Dv], decay
    [rows, heads] or [rows, heads, D], beta [rows, heads], states [slots, heads, D, Dv].
    """
    group = value.shape[1] // key.shape[1]
    q, k = (x.repeat_interleave(group, 1).float() for x in (query, key))
    if l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q / q.shape[-1] ** 0.5
    factor = decay.float().exp()
    state = read(states, source).float() * (factor[..., None] if decay.ndim == 3 else factor[..., None, None])
    delta = (value.float() - (state * k.unsqueeze(-1)).sum(-2)) * beta.float().unsqueeze(-1)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    write(states, target, state)
    out: torch.Tensor = (state * q.unsqueeze(-1)).sum(-2).to(query.dtype)
    return out


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
) -> torch.Tensor:
    """One token of Mamba-2's selective scan; x and gate [rows, heads, P], dt [rows, heads], A, D and
    dt_bias [heads], B and C [rows, groups, N], states [slots, heads, P, N].
    """
    group = x.shape[1] // B.shape[1]
    b, c = (each.repeat_interleave(group, 1) for each in (B, C))
    t = times_of(dt, dt_bias, softplus)
    added = (t[..., None] * b).unsqueeze(-2) * x.unsqueeze(-1)
    state = read(states, source) * (t.float() * A.float()).exp()[..., None, None] + added
    write(states, target, state)
    out = torch.einsum("rhpn,rhn->rhp", state.to(c.dtype), c)
    if D is not None:
        out = (out + x * D[:, None]).to(out.dtype)
    return (out if gate is None else out * F.silu(gate)).to(x.dtype)


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
) -> torch.Tensor:
    """One token of Mamba's selective scan; x, dt and gate [rows, channels], A [channels, N], B and C
    [rows, N], D and dt_bias [channels], states [slots, channels, N].
    """
    t = times_of(dt, dt_bias, softplus).float()[..., None]
    added = t * B.float()[:, None] * x.float()[..., None]
    state = read(states, source).float() * (t * A.float()).exp() + added
    write(states, target, state)
    out = (state.to(C.dtype) @ C[..., None])[..., 0]
    if D is not None:
        out = out + x * D
    return (out if gate is None else out * F.silu(gate)).to(x.dtype)


def times_of(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """The time [..., channels] that tokens take."""
    t = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(t) if softplus else t


def read(states: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The states [rows, ...] in slots `source`; zeros behind -1."""
    found = states.index_select(0, source.clamp(min=0))
    absent = (source < 0).view(-1, *[1] * (found.ndim - 1))
    return found.masked_fill(absent, 0)


def write(states: torch.Tensor, target: torch.Tensor, new: torch.Tensor) -> None:
    """Put new states [rows, ...] into slots `target`; those of -1 go to the last slot, which no row reads."""
    spare = target.new_full((), len(states) - 1)
    states.index_copy_(0, torch.where(target < 0, spare, target), new.to(states.dtype))
