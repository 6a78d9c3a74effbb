"""An adapter of any kind in a peft model: its tensors and settings, by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..adaption_prompts import layers_of
from ..peft_layers import LoraLayers
from ..routers import take_means
from ..weights_digest import tensor_facts

STATE = frozenset({"_caches", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
"""Attributes of peft's modules that are no settings of an adapter."""
FLAGS = frozenset({"_active_adapter", "_disable_adapters", "training"})
EXPERTS = ("task_adapter_names", "gks_adapter_names")
"""Where a router over adapters (Arrow) has their names."""
PLAIN = (bool, int, float, str, type(None), torch.dtype)


class PeftContent:
    """An adapter that peft's own modules compute: all that they keep under its name, and tensors that they
    keep for all adapters.
    """

    def __init__(self, lora: LoraLayers, name: str) -> None:
        self.name = name
        self._modules: list[Any] = (
            [tuner for tuner in lora.tuners if self._is_in(tuner)]
            if lora.prompts is None
            else layers_of(lora.prompts, name)
        )

    def _is_in(self, tuner: Any) -> bool:
        return any(self.name in held for held in _by_name(tuner).values())

    @cached_property
    def _parts(self) -> list[tuple[nn.Module, str, Any]]:
        """By module and attribute what lies there under the name."""
        return [
            (module, where, held[name])
            for module in self._modules
            for where, held in _by_name(module).items()
            for name in (self.name, *self._read_by_it(module))
            if name in held
        ]

    def _read_by_it(self, module: Any) -> list[str]:
        """Other adapters of a module, with whose weights this one computes: a router's experts."""
        own = [held[self.name] for held in _by_name(module).values() if self.name in held]
        found = chain.from_iterable(getattr(part, where, None) or () for part in own for where in EXPERTS)
        return [name for name in dict.fromkeys(found) if name != self.name]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """All its weights, each once."""
        shared = (each for module in self._modules for each in _own_tensors(module))
        found = chain(chain.from_iterable(_tensors_in(part) for _, _, part in self._parts), shared)
        return list({id(each): each for each in found}.values())

    @cached_property
    def facts(self) -> Any:
        """Its settings and the shapes of its tensors; with `objects` and `weights` it is to an `Identity`
        what a `ModelSnapshot` is.
        """
        parts = [(id(module), where, _fact(part)) for module, where, part in self._parts]
        return tuple(parts), tuple([_plain_settings(module) for module in self._modules])

    @property
    def objects(self) -> dict[int, object]:
        """The modules that compute it, by id."""
        return {id(module): module for module in self._modules}

    def weights(self) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """Its tensors; none is in a file."""
        return self.tensors, ()

    @property
    def versions(self) -> tuple[Any, ...]:
        """The host's facts about its tensors, writes to them among these, and its settings."""
        return tensor_facts(self.tensors), self.facts

    @property
    def whole(self) -> bool:
        """True if all tokens of a forward change each other."""
        return take_means(self._modules)

    @property
    def rank(self) -> int:
        """The largest rank that its settings name, 0 if they name none."""
        ranks = [part for _, where, part in self._parts if where == "r" and isinstance(part, int)]
        return max(ranks, default=0)

    @cached_property
    def bytes(self) -> int:
        """The memory of its weights."""
        return sum(tensor.nbytes for tensor in self.tensors)


def _by_name(tuner: Any) -> dict[str, Any]:
    """The containers of a module that have an entry for each adapter."""
    own = {**tuner.__dict__, **tuner._modules}
    return {where: held for where, held in own.items() if where not in STATE and _has_names(held)}


def _has_names(held: Any) -> bool:
    """True for a container with entries by name: a dict, one of torch's or peft's dict of buffers."""
    return isinstance(held, (Mapping, nn.ModuleDict, nn.ParameterDict)) or (
        isinstance(held, nn.Module) and type(held).__name__ == "BufferDict"
    )


def _plain_settings(tuner: Any) -> tuple[tuple[str, Any], ...]:
    """The numbers and words among a module's settings, but which adapters are active."""
    own = tuner.__dict__.items()
    return tuple([each for each in own if each[0] not in FLAGS and isinstance(each[1], PLAIN)])


def _own_tensors(tuner: Any) -> Iterator[torch.Tensor]:
    """Tensors that a module of peft's keeps for all adapters."""
    for held in (*tuner._parameters.values(), *tuner._buffers.values(), *tuner.__dict__.values()):
        if isinstance(held, torch.Tensor):
            yield held


def _tensors_in(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, nn.Module):
        yield from part.parameters()
        yield from part.buffers()
    elif isinstance(part, (list, tuple)):
        yield from chain.from_iterable(map(_tensors_in, part))
    elif isinstance(part, (Mapping, nn.ParameterDict)):
        yield from chain.from_iterable(map(_tensors_in, part.values()))


def _fact(part: Any) -> Any:
    """A setting by its value, an object by which one it is, a tensor by its shape."""
    if isinstance(part, PLAIN):
        return part
    if isinstance(part, torch.Tensor):
        return tuple(part.shape), part.dtype
    if isinstance(part, (list, tuple)):
        return tuple(map(_fact, part))
    return id(part)
