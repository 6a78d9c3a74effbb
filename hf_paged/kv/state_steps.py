"""Tokens of rows through convolutions and recurrences, by slots of their states, in plain torch: what the
kernels of the same names are held to. A step is one token of each row. Spans are any number of them, those of
a row from begins[i] to ends[i].

States [slots, ...] are those of one layer. source and target [rows], int64, are the slot that each row reads,
-1 for no past, and the slot that it writes, -1 for none. No row may write what another row reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

Spans = tuple[torch.Tensor, torch.Tensor]
"""Where the tokens of rows begin and end."""
Step = Callable[..., torch.Tensor]


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    activation: str | None = None,
    spans: Spans | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token x [rows, C] of a causal convolution; weight [C, k], bias [C], states [slots, C, k]. spans:
    only rows of one token, at its place in x and out.
    """
    if spans is not None and out is not None:

        def step(token: torch.Tensor, *slots: torch.Tensor) -> torch.Tensor:
            return conv_step(x[token], weight, bias, *slots, activation=activation)

        begins, ends = spans
        return _through(step, (states, source, target), begins, ends, ends - begins == 1, out, 1)
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
    spans: Spans | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of the gated delta rule; query and key [rows, key_heads, D], value [rows, heads, Dv], decay
    [rows, heads] or [rows, heads, D], beta [rows, heads], states [slots, heads, D, Dv]. spans: only rows of
    one token, at its place in the others and out.
    """
    if spans is not None and out is not None:

        def step(token: torch.Tensor, *slots: torch.Tensor) -> torch.Tensor:
            x = [each[token] for each in (query, key, value, decay, beta)]
            return delta_step(x[0], x[1], x[2], x[3], x[4], *slots, l2norm=l2norm)

        begins, ends = spans
        return _through(step, (states, source, target), begins, ends, ends - begins == 1, out, 1)
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
    answer: torch.Tensor = (state * q.unsqueeze(-1)).sum(-2).to(query.dtype)
    return answer


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
    """Spans of at least so many tokens of a causal convolution, answered in out."""

    def step(token: torch.Tensor, *slots: torch.Tensor) -> torch.Tensor:
        return conv_step(x[token], weight, bias, *slots, activation=activation)

    return _through(step, (states, source, target), begins, ends, ends - begins >= least, out, len(x))


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
    """Spans of at least so many tokens of the gated delta rule, answered in out."""

    def step(token: torch.Tensor, *slots: torch.Tensor) -> torch.Tensor:
        x = [each[token] for each in (query, key, value, decay, beta)]
        return delta_step(x[0], x[1], x[2], x[3], x[4], *slots, l2norm=l2norm)

    longest = len(query) if longest is None else longest
    return _through(step, (states, source, target), begins, ends, ends - begins >= least, out, longest)


def _through(
    step: Step, slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor], begins: torch.Tensor,
    ends: torch.Tensor, wanted: torch.Tensor, out: torch.Tensor, longest: int,
) -> torch.Tensor:  # fmt: skip
    """Take rows that are wanted through their tokens, at most `longest`, one after another."""
    states, source, target = slots
    held = torch.cat([read(states, source), states[-1:]])
    rows = torch.arange(len(begins), device=begins.device)
    for i in range(longest):
        token = begins + i
        here = wanted & (token < ends)
        answer = step(token.clamp(max=len(out) - 1), held, rows, torch.where(here, rows, -1))
        place = torch.where(here, token, len(out)).long()
        out.copy_(torch.cat([out, out[:1]]).index_copy(0, place, answer.to(out.dtype))[:-1])
    write(states, torch.where(wanted, target, -1), held[:-1])
    return out


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
