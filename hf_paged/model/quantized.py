"""What quantized layers keep beside their weights, and which ones round a token by the rest of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

NESTED = 2
"""How deep a weight's scales may lie in objects: scales of scales (bitsandbytes' double quantization)."""


def scales_of(module: nn.Module, weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors without which a quantized weight of a module cannot be read, where they are neither
    parameters nor buffers.

    Types that list their own parts (torchao's) need nothing here.
    """
    if hasattr(weight, "__tensor_flatten__"):
        return
    yield from (tensor for tensor in _inside(weight, NESTED) if tensor.data_ptr() != weight.data_ptr())
    scales = getattr(_int8_state(module), "SCB", None)
    if isinstance(scales, torch.Tensor):
        yield scales


def _inside(value: Any, depth: int) -> Iterator[torch.Tensor]:
    for part in vars(value).values():
        if isinstance(part, torch.Tensor):
            yield part
        elif (
            depth
            and hasattr(part, "__dict__")
            and not isinstance(part, (nn.Module, type))
            and not callable(part)
        ):
            yield from _inside(part, depth - 1)


def looks_around(module: nn.Module, weight: torch.Tensor) -> bool:
    """Whether the layer rounds a token by the others of its batch: then its result must not be shared.

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
