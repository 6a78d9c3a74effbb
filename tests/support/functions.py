"""The functions of one number that batch-invariant kernels compute, as torch has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F  # its usual name

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "erf": torch.erf,
    "softplus": F.softplus,
    "pow": lambda x: x**1.7,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
}
OF_SIZES = {"log", "log1p", "pow"}
"""Functions that are given no negative numbers."""
