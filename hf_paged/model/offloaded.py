"""Offloaded weights: accelerate keeps them on the host or in files, and its hooks load them for a forward."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .weights_digest import Unreadable

HOOK = "_hf_hook"
"""The attribute in which accelerate keeps a module's hook."""
FSDP = ("FullyShardedDataParallel", "FSDPModule")
"""Classes of modules whose weights are divided among ranks, of both versions."""
FileFacts = tuple[str, int, int, int, int]


class OffloadStorage(NamedTuple):
    """The places where the offloaded tensors of a model are stored: memory, or files known by their facts."""

    tensors: list[torch.Tensor]
    files: list[FileFacts]


class Offloaded(NamedTuple):
    """The tensors of one module that a hook loads from `weights` under `prefix` and their names."""

    weights: Mapping[str, Any]
    prefix: str
    buffers: bool
    """True if its persistent buffers are offloaded together with its parameters."""

    def names(self, module: nn.Module) -> set[str]:
        """The module's own tensors that are offloaded."""
        persistent = module._buffers.keys() - module._non_persistent_buffers_set
        found = {name for name, tensor in module._parameters.items() if tensor is not None}
        return found | {name for name in persistent if self.buffers and module._buffers[name] is not None}

    def resident(self, module: nn.Module) -> list[torch.Tensor | None]:
        """The module's own tensors that stay in it."""
        names = self.names(module)
        own = (*module._parameters.items(), *module._buffers.items())
        return [tensor for name, tensor in own if name not in names]

    def stored(self, module: nn.Module) -> Iterator[torch.Tensor | FileFacts]:
        """Where each offloaded tensor is stored."""
        for name in sorted(self.names(module)):
            yield _stored(self.weights, self.prefix + name)


def divided(kinds: Iterable[type]) -> bool:
    """True if FSDP divides modules of these classes: each rank has, and sees changes of, its part alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return False
    names = {base.__name__ for kind in set(kinds) for base in kind.__mro__}
    return not names.isdisjoint(FSDP)


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Accelerate's hooks of a module, those in a sequence of hooks one by one."""
    pending = [module.__dict__.get(HOOK)]
    for hook in pending:
        if hook is not None:
            pending += getattr(hook, "hooks", ())
            yield hook


def _loading(module: nn.Module) -> list[Any]:
    """Those of its hooks that load weights for a forward."""
    hooks = [hook for hook in hooks_of(module) if getattr(hook, "offload", False)]
    return [hook for hook in hooks if getattr(hook, "weights_map", None) is not None]


def offloads(module: nn.Module) -> bool:
    """True if weights of the module are loaded for each forward."""
    return HOOK in module.__dict__ and bool(_loading(module))


def offloaded(modules: Iterable[nn.Module]) -> dict[int, Offloaded]:
    """The modules with offloaded tensors, by id."""
    found: dict[int, Offloaded] = {}
    for module in modules:
        if not offloads(module):
            continue
        for hook in _loading(module):
            weights = hook.weights_map
            buffers = bool(getattr(hook, "offload_buffers", False))
            parts = module.named_modules() if getattr(hook, "place_submodules", False) else [("", module)]
            for name, part in parts:
                found[id(part)] = Offloaded(weights, f"{name}." if name else "", buffers)
    return found


def stored(modules: Iterable[nn.Module], where: Mapping[int, Offloaded]) -> OffloadStorage:
    """The offloaded tensors of modules, as they are stored now."""
    tensors: list[torch.Tensor] = []
    files: list[FileFacts] = []
    for module in modules:
        own = where.get(id(module))
        for place in () if own is None else own.stored(module):
            if isinstance(place, torch.Tensor):
                tensors.append(place)
            else:
                files.append(place)
    return OffloadStorage(tensors, files)


def input_device(model: Any) -> torch.device:
    """The device on which the model takes its inputs. Offloaded weights do not reveal it; their hooks do."""
    first = first_parameter(model)
    device: torch.device = model.device if first is None else first.device
    if HOOK not in model.__dict__ and device.type != "meta":
        return device
    for module in model.modules() if device.type == "meta" else [model]:
        for hook in hooks_of(module):
            target = getattr(hook, "execution_device", None)
            if target is not None:
                return torch.empty(0, dtype=torch.bool, device=target).device
    return device


def first_parameter(module: nn.Module) -> torch.Tensor | None:
    """The first parameter inside a module. torch's own walk takes longer than a layer."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        found = None if child is None else first_parameter(child)
        if found is not None:
            return found
    return None


def unloaded(model: nn.Module) -> list[str]:
    """The names of parameters that have no memory and that no hook loads."""
    where = offloaded(model.modules())
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if id(module) not in where
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.device.type == "meta"
    ]


def _stored(weights: Any, name: str) -> torch.Tensor | FileFacts:
    """Where accelerate's maps of weights have a tensor: nothing is loaded."""
    while hasattr(weights, "dataset") and hasattr(weights, "prefix"):
        name = f"{weights.prefix}{name}"
        weights = weights.dataset
    in_memory = getattr(weights, "state_dict", weights)
    if isinstance(in_memory, Mapping) and isinstance(tensor := in_memory.get(name), torch.Tensor):
        return tensor
    entry = getattr(weights, "index", {}).get(name)
    if entry is None:
        raise Unreadable(f"{name} is offloaded to {type(weights).__name__}, which cannot be compared")
    path = entry.get("safetensors_file") or os.path.join(weights.save_folder, f"{name}.dat")
    return _file_facts(os.fspath(path))


def _file_facts(path: str) -> FileFacts:
    """Facts that change when a file is written or replaced."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise Unreadable(f"offloaded weights cannot be read: {error}") from error
    return path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
