"""Weights of which each rank has a part."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_divided(module: nn.Module, size: int) -> bool:
    """True if each rank has an equal part of a layer's weight, and nothing is quantized."""
    weight: Any = module._parameters.get("weight")
    if not hasattr(weight, "placements") or hasattr(module, "_hf_quantized_needs_local_tp"):
        return False
    shards = [each.dim for each in weight.placements if each.is_shard()]
    return all(weight.shape[dim] % size == 0 for dim in shards)


def is_sharded(module: nn.Module) -> bool:
    """True if each rank has a part of a layer's weight."""
    weight: Any = module._parameters.get("weight")
    return any(each.is_shard() for each in getattr(weight, "placements", ()))


def local_part(parameter: Any) -> Any:
    """A rank's part of a parameter; all of it if it is not divided."""
    return getattr(parameter, "_local_tensor", parameter)
