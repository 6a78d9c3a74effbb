"""Tensors of quantized layers beside weights, and layers that round a token by the rest of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .weights_digest import PLAIN_TENSORS

NESTED = 2
"""How deep a weight's scales may lie in objects: scales of scales (bitsandbytes' double quantization)."""
PARTS = frozenset(nn.Module().__dict__)
"""The attributes of every module, parameters and buffers among them."""


def is_quantized(tensor: torch.Tensor) -> bool:
    """True for a weight that may need scales to be read: of a type of its own, or of integers."""
    return type(tensor) not in PLAIN_TENSORS or (
        type(tensor) is nn.Parameter and not (tensor.is_floating_point() or tensor.is_complex())
    )


def scales_of(module: nn.Module, weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors without which a quantized weight of a module cannot be read, where they are neither
    parameters nor buffers.

    Types that list their own parts (torchao's) need nothing here.
    """
    for holder in holders_of(module, weight):
        yield from _other_tensors(vars(holder).values(), weight)
    scales = getattr(_int8_state(module), "SCB", None)
    if isinstance(scales, torch.Tensor):
        yield scales
    if type(weight) in PLAIN_TENSORS:  # HQQ's, whose scales lie in a dict of the module
        settings = [value for name, value in module.__dict__.items() if name not in PARTS]
        yield from _in_dicts(settings, weight)


def holders_of(module: nn.Module, weight: torch.Tensor) -> Iterator[Any]:
    """The objects whose attributes are a quantized weight's scales: the weight itself, and those on it."""
    if hasattr(weight, "__tensor_flatten__") or type(weight) in PLAIN_TENSORS:
        return
    yield from _objects(weight, NESTED)


def _objects(value: Any, depth: int) -> Iterator[Any]:
    yield value
    for part in vars(value).values() if depth else ():
        nested = hasattr(part, "__dict__") and not isinstance(part, (torch.Tensor, nn.Module, type))
        if nested and not callable(part):
            yield from _objects(part, depth - 1)


def _other_tensors(values: Iterable[Any], weight: torch.Tensor) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor) and value.data_ptr() != weight.data_ptr():
            yield value


def _in_dicts(values: Iterable[Any], weight: torch.Tensor, depth: int = NESTED) -> Iterator[torch.Tensor]:
    for value in values:
        if type(value) is dict:
            yield from _other_tensors(value.values(), weight)
            if depth:
                yield from _in_dicts(value.values(), weight, depth - 1)


def looks_around(module: nn.Module, weight: torch.Tensor) -> bool:
    """True if the layer rounds a token by the others of its batch: then its result must not be shared.

    bitsandbytes' int8 layers keep those columns exact in which any token is an outlier; a scale for a whole
    tensor of activations (torchao's PerTensor) is the largest token's.
    """
    if getattr(_int8_state(module), "threshold", 0):
        return True
    rounding = getattr(weight, "act_quant_kwargs", None)
    fixed = getattr(weight, "act_quant_scale", None) is not None
    return type(getattr(rounding, "granularity", None)).__name__ == "PerTensor" and not fixed


def _int8_state(module: nn.Module) -> Any:
    """Where bitsandbytes' int8 layers put their scales at their first forward."""
    state = module.__dict__.get("state")
    return state if hasattr(state, "SCB") else None
