"""peft's batches of several adapters in `batch_invariant()`: each row has the bits of a batch of its own."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ...kv.reference import invariant

BASE = "__base__"
"""peft's name for no adapter."""


def add_in_one_order() -> None:
    """Let peft's LoRA layers add an adapter to some rows as they add it to all, once they are imported: the
    sum is rounded to the model's type. Outside of the mode `adapter_names` has the product rounded first.
    """
    layer_class = getattr(sys.modules.get("peft.tuners.lora.layer"), "LoraLayer", None)
    if layer_class is not None:
        _replace(layer_class)


@functools.cache
def _replace(layer_class: Any) -> None:
    """Replace the forward of mixed batches of peft's LoRA layers."""
    stock = layer_class._mixed_batch_forward

    @functools.wraps(stock)
    def forward(self: Any, x: Any, *args: Any, adapter_names: list[str], **kwargs: Any) -> Any:
        if not invariant.get():
            return stock(self, x, *args, adapter_names=adapter_names, **kwargs)
        own = {name for name in adapter_names if name in self.lora_A and name not in self.lora_variant}
        others = [BASE if name in own else name for name in adapter_names]
        result = stock(self, x, *args, adapter_names=others, **kwargs)
        for name in own:
            rows = [row for row, each in enumerate(adapter_names) if each == name]
            result[rows] = (result[rows] + _product(self, name, x[rows])).to(result.dtype)
        return result

    layer_class._mixed_batch_forward = forward


def _product(layer: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """An adapter's addition to a layer's outputs for x, in the adapter's type."""
    first = layer.lora_A[name]
    given = layer.lora_dropout[name](x.to(first.weight.dtype))
    made: torch.Tensor = layer.lora_B[name](first(given)) * layer.scaling[name]
    return made
