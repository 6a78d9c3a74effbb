"""Weights of a model that change or leave between the requests of an engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..model.offloaded import offloaded
from ..model.ranks.tensor_parallel import divided_otherwise, mesh_of
from ..model.shards import require_known_parts
from ..model.switch import modules_of

PauseMode = Literal["recompute", "wait", "abort", "keep"]
"""The fate of requests when an engine pauses: they wait and are computed again, they are finished first, they
end, or they wait with their keys and values.
"""
KeptBlocks = Literal["drop", "keep"]
"""The fate of keys and values when weights have changed."""
PREFIXES = ("base_model.model.", "module.")
"""Prefixes of a model's names that wrappers add."""
INSIDE = re.compile(r"_orig_mod\.|\.base_layer")
"""Names that torch.compile and peft's LoRA insert."""


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise unless a value is among the choices of a Literal."""
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r} is not one of {get_args(choices)}")


def load_into(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy tensors into the model's parameters and buffers of these names, in place; the names.

    ValueError for a name, a shape or a kind of numbers that the model does not have; what came before it is
    copied already.
    """
    if isinstance(weights, str) or not isinstance(weights, Iterable):
        raise TypeError(f"load_weights got {weights!r:.50}; give a state dict or pairs of name and tensor")
    require_known_parts(model)
    tensors: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
    tensors |= dict(model.named_parameters(remove_duplicate=False))
    own = {INSIDE.sub("", name): (name, tensor) for name, tensor in tensors.items()}
    loaded = set()
    otherwise = None if mesh_of(model) is None else divided_otherwise(model)
    with torch.no_grad():
        for given, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            name, target = own[_own_name(given, own)]
            _require_like(given, tensor, target)
            if isinstance(target, DTensor):  # of which the same part of what was given belongs here
                if otherwise is None or name.replace(".base_layer", "") in otherwise:
                    raise ValueError(
                        f"load_weights got {given!r}, which transformers has made of a rank's part of "
                        "something else: which part of this belongs there is not known; load the model again"
                    )
                whole = tensor.to(target.device)
                tensor = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(tensor)
            loaded.add(name)
    return loaded


def _require_like(given: str, tensor: object, target: torch.Tensor) -> None:
    """Raise unless copying a tensor leaves its numbers what they are, up to their rounding."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"load_weights got {given!r} as {type(tensor).__name__}, expected a tensor")
    if target.shape != tensor.shape:
        raise ValueError(
            f"load_weights got {given!r} of shape {list(tensor.shape)}, expected {list(target.shape)}"
        )
    dtypes = {tensor.dtype, target.dtype}
    if len(dtypes) > 1 and not all(each.is_floating_point and each.itemsize > 1 for each in dtypes):
        raise ValueError(
            f"load_weights got {given!r} in {tensor.dtype}, expected {target.dtype}: numbers of a quantized "
            "weight mean nothing without its scales; give both as the model has them"
        )


def _own_name(given: str, own: Mapping[str, object]) -> str:
    name = INSIDE.sub("", given)
    while name not in own:
        prefix = next((each for each in PREFIXES if name.startswith(each)), None)
        if prefix is None:
            raise ValueError(
                f"load_weights got {given!r}, and {len(own)} tensors of the model have other names, such as "
                f"{next(iter(own), '')!r}; give names as in model.state_dict()"
            )
        name = name.removeprefix(prefix)
    return name


def on_devices(model: nn.Module) -> list[tuple[torch.Tensor, torch.device]]:
    """The weights of a model that are not in the host's memory, and the device of each."""
    if offloaded(modules_of(model)):
        raise ValueError(
            f"accelerate has offloaded the weights of {type(model).__name__} already; use sleep(level=1)"
        )
    tensors = (*model.parameters(), *model.buffers())
    return [(tensor, tensor.device) for tensor in tensors if tensor.device.type != "cpu"]
