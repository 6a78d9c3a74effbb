"""Weights of which each rank has a part."""

from __future__ import annotations

from typing import Any

import transformers
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


def why_parts_are_unknown(model: nn.Module) -> str | None:
    """Why ranks do not know which part of a weight each has, as in transformers 5.9; None if they do, or if
    one process has all of the model.
    """
    alone = getattr(model, "_device_mesh", None) is None or (getattr(model, "_tp_size", None) or 1) < 2
    if alone or any(hasattr(each, "placements") for each in model.parameters()):
        return None
    return (
        f"transformers {transformers.__version__} does not say which part of a weight a rank has, so ranks "
        "take neither adapters nor other weights; upgrade it, or use one process"
    )


def require_known_parts(model: nn.Module) -> None:
    """Raise unless ranks can take adapters and other weights."""
    reason = why_parts_are_unknown(model)
    if reason is not None:
        raise ValueError(reason)
