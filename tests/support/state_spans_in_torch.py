"""The kernels that step states of a captured step, in plain torch: spans of tokens go through the steps of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_paged.kv import state_steps
from hf_paged.kv.state_steps import read, ssm_step, write

__all__ = ["conv_spans", "conv_step", "delta_spans", "delta_step", "scan_step", "ssm_step"]
scan_step = state_steps.scan_step
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
