"""Linear layers in captured steps of few rows: a kernel reads their weights where they lie, at the speed of
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from ...kv.ops import on
from ...kv.reference import invariant
from ..device_map import runs_class_forward

HALVES = (torch.bfloat16, torch.float16)
MOST_ROWS = 8
MOST_WEIGHTS = 3
"""Of one launch."""


def may_read(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """True if a layer is a product by a parameter and no more: a kernel reads it before the kernels ahead of
    it end, so nothing in a step may have written it.
    """
    own: Any = layer
    if type(layer) is not nn.Linear or not runs_class_forward(layer):
        return False
    given = [own.weight] if own.bias is None else [own.weight, own.bias]
    return all(type(each) is nn.Parameter and each.dtype in HALVES and each.is_contiguous() for each in given)


def few_rows(kernels: Any, x: torch.Tensor, layers: Sequence[nn.Linear]) -> Sequence[torch.Tensor] | None:
    """The products of x by linear layers, of which `may_read` is true; None if others compute them better."""
    first = layers[0].weight
    if (
        not 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        or not kernels.launches_early(x.device)  # what older devices gain was not measured
        or not _fit(layers, x.dtype)
        or any(layer.weight.device != x.device for layer in layers)
        or torch.is_autocast_enabled("cuda")
        or invariant.get()
    ):
        return None
    lines = x.reshape(-1, first.shape[1])
    biases = None if layers[0].bias is None else [layer.bias for layer in layers]
    with on(x.device):
        products = kernels.gemv(lines, [layer.weight for layer in layers], biases)
    parts: Sequence[torch.Tensor] = products.view(*x.shape[:-1], -1).split(
        [layer.out_features for layer in layers], -1
    )
    return parts


def _fit(layers: Sequence[nn.Linear], dtype: torch.dtype) -> bool:
    """True if one launch computes the products of layers with an input of this type."""
    biased = {layer.bias is not None for layer in layers}
    return (
        dtype in HALVES
        and len(layers) <= MOST_WEIGHTS
        and len(biased) == 1
        and all(layer.weight.dtype == dtype for layer in layers)
    )


def calls_of(
    kernels: Any, layers: Sequence[nn.Linear], rows: int, dtype: torch.dtype
) -> dict[Any, Callable[[], object]]:
    """The call of the kernel for these layers, on tensors without data."""
    meta = torch.device("meta")
    if not kernels.launches_early(meta) or rows > MOST_ROWS or not _fit(layers, dtype):
        return {}
    weights = [torch.empty_like(layer.weight, device=meta) for layer in layers]
    biases = [torch.empty_like(layer.bias, device=meta) for layer in layers if layer.bias is not None]
    x = torch.empty(rows, layers[0].in_features, dtype=dtype, device=meta)
    key = "gemv", *(weight.shape for weight in weights), bool(biases)
    return {key: partial(kernels.gemv, x, weights, biases or None)}
