"""The kernels that step states of a captured step, in plain torch: spans of tokens go through the steps of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_paged.kv import state_steps
from hf_paged.kv.state_steps import read, times_of, write

ANY_TIME = (0.0, float("inf"))
Slots = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""States, and the slots that rows read and write."""
Step = Callable[..., torch.Tensor]


def conv_step(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *slots: torch.Tensor, spans: Any = None,
    out: Any = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """As there; spans: the rows of one token alone, at its place in x and out."""

    def step(token: torch.Tensor, *slots: torch.Tensor) -> torch.Tensor:
        return state_steps.conv_step(x[token], weight, bias, *slots, **options)

    if spans is None:
        return state_steps.conv_step(x, weight, bias, *slots, **options)
    return through(step, slots, *spans, out, least=1, most=1)


def conv_spans(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *slots: torch.Tensor,
    begins: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, least: int = 1, **options: Any,
) -> torch.Tensor:  # fmt: skip
    def step(token: torch.Tensor, *slots: torch.Tensor) -> torch.Tensor:
        return state_steps.conv_step(x[token], weight, bias, *slots, **options)

    return through(step, slots, begins, ends, out, least, len(x))


def delta_step(
    *given: torch.Tensor, spans: Any = None, out: Any = None, l2norm: bool = False
) -> torch.Tensor:
    """As there; spans: the rows of one token alone, at its place in the others and out."""
    if spans is None:
        return state_steps.delta_step(*given, l2norm=l2norm)
    return through(_delta(given[:5], l2norm), given[5:], *spans, out, least=1, most=1)


def delta_spans(
    *given: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, least: int = 1,
    longest: int | None = None, l2norm: bool = False,
) -> torch.Tensor:  # fmt: skip
    most = len(given[0]) if longest is None else longest
    return through(_delta(given[:5], l2norm), given[5:], begins, ends, out, least, most)


def _delta(given: tuple[torch.Tensor, ...], l2norm: bool) -> Step:
    def step(token: torch.Tensor, *slots: torch.Tensor) -> torch.Tensor:
        return state_steps.delta_step(*[each[token] for each in given], *slots, l2norm=l2norm)

    return step


def ssm_step(
    *given: Any,
    spans: Any = None,
    out: Any = None,
    limit: Any = ANY_TIME,
    softplus: bool = False,
    **options: Any,
) -> torch.Tensor:
    """As there; spans: the rows of one token alone, at its place in the others and out."""
    if spans is None:
        return state_steps.ssm_step(*given, softplus=softplus, **options)
    first = spans[0][:, None] == torch.arange(len(out), device=out.device)
    x = _timed(given[:7], softplus, limit, (first & (given[8] < 0)[:, None]).any(0))
    return through(_tokens_of(state_steps.ssm_step, x), given[7:], *spans, out, least=1, most=1)


def ssm_spans(
    *given: Any, begins: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, least: int = 1,
    limit: Any = ANY_TIME, softplus: bool = False,
) -> torch.Tensor:  # fmt: skip
    x = _timed(given[:7], softplus, limit, torch.ones(len(out), dtype=torch.bool, device=out.device))
    return through(_tokens_of(state_steps.ssm_step, x), given[7:], begins, ends, out, least, len(out))


def _timed(given: Any, softplus: bool, limit: Any, limited: torch.Tensor) -> Any:
    """The arguments of a scan with the time that tokens take, which is limited for some of them [tokens]."""
    x, dt, a, b, c, skip, bias = given
    times = times_of(dt, bias, softplus)
    return x, torch.where(limited[:, None], times.clamp(*limit), times), a, b, c, skip, None


def scan_step(
    *given: Any, spans: Any = None, out: Any = None, gate: Any = None, softplus: bool = False
) -> torch.Tensor:
    """As there; spans: the rows of one token alone, at its place in the others and out."""
    if spans is None:
        return state_steps.scan_step(*given, gate=gate, softplus=softplus)
    step = _tokens_of(state_steps.scan_step, given[:7], gate, softplus=softplus)
    return through(step, given[7:], *spans, out, least=1, most=1)


def scan_spans(
    *given: Any, begins: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, least: int = 1, gate: Any = None,
    softplus: bool = False,
) -> torch.Tensor:  # fmt: skip
    step = _tokens_of(state_steps.scan_step, given[:7], gate, softplus=softplus)
    return through(step, given[7:], begins, ends, out, least, len(out))


def _tokens_of(scan: Step, given: Any, gate: Any = None, **options: Any) -> Step:
    """A step of a scan whose arguments are of all tokens."""
    x, dt, a, b, c, *rest = given

    def step(token: torch.Tensor, *slots: torch.Tensor) -> torch.Tensor:
        gated = None if gate is None else gate[token]
        return scan(x[token], dt[token], a, b[token], c[token], *rest, *slots, gate=gated, **options)

    return step


def through(
    step: Step, slots: tuple[torch.Tensor, ...], begins: torch.Tensor, ends: torch.Tensor, out: torch.Tensor,
    least: int, most: int,
) -> torch.Tensor:  # fmt: skip
    """Take the rows of `least` to `most` tokens through them, one after another."""
    states, source, target = slots
    counts = ends - begins
    wanted = (counts >= least) & (counts <= most)
    held = torch.cat([read(states, source), states[-1:]])
    rows = torch.arange(len(begins), device=begins.device)
    for i in range(most):
        token = begins + i
        here = wanted & (token < ends)
        answer = step(token.clamp(max=len(out) - 1), held, rows, torch.where(here, rows, -1))
        place = torch.where(here, token, len(out)).long()
        out.copy_(torch.cat([out, out[:1]]).index_copy(0, place, answer.to(out.dtype))[:-1])
    write(states, torch.where(wanted, target, -1), held[:-1])
    return out
