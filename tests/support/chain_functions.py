"""The operations of chains in torch, and parts of lines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "copy": lambda x: x,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "abs": torch.abs,
    "square": torch.square,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "relu": torch.relu,
    "at_least": lambda x, least: x.clamp(min=least),
    "at_most": lambda x, most: x.clamp(max=most),
    "clamp": lambda x, least, most: x.clamp(least, most),
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
}


def _cat(*operands: torch.Tensor | float) -> torch.Tensor:
    return torch.cat([x for x in operands if isinstance(x, torch.Tensor)], -1)


def _slice(x: torch.Tensor, begin: float, end: float, step: float) -> torch.Tensor:
    return x[..., int(begin) : int(end) : int(step)]


PARTS: dict[str, Callable[..., torch.Tensor]] = {
    "cat": _cat,
    "slice": _slice,
    "interleave": lambda x, y: torch.stack([x, y], -1).flatten(-2),
}
