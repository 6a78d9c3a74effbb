"""What a LoRA adapter adds to the linear layers of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from ..weights_digest import version_of


class LowRank(NamedTuple):
    """What an adapter adds to a layer's output: scale * (x a^T) b^T."""

    a: torch.Tensor
    """[rank, inputs]"""
    b: torch.Tensor
    """[outputs, rank]"""
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter's low-rank products by layer. Layers that it leaves as they are have none."""

    layers: Mapping[nn.Module, LowRank]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All its weights."""
        return [tensor for each in self.layers.values() for tensor in (each.a, each.b)]

    @property
    def facts(self) -> Any:
        """What changes with its settings; with `objects` and `weights` it is to an `Identity` what a
        `ModelSnapshot` is.
        """
        return tuple([(id(module), part.scale, part.a.shape) for module, part in self.layers.items()])

    @property
    def objects(self) -> dict[int, object]:
        """The layers that it adds to, by id."""
        return {id(module): module for module in self.layers}

    def weights(self) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """Its tensors; none is in a file."""
        return self.tensors, ()

    @property
    def versions(self) -> tuple[Any, ...]:
        """Its tensors, where they lie, how often torch has counted a write to them, and its scales."""
        tensors = ((each, part.scale) for part in self.layers.values() for each in (part.a, part.b))
        return tuple([(id(each), each.data_ptr(), version_of(each), scale) for each, scale in tensors])

    @property
    def rank(self) -> int:
        """Its largest rank."""
        return max((each.a.shape[0] for each in self.layers.values()), default=0)

    @cached_property
    def bytes(self) -> int:
        """The memory of its weights."""
        return sum(tensor.nbytes for tensor in self.tensors)


def combine(adapters: Sequence[Adapter]) -> Adapter:
    """One adapter that adds what several add together. Its weights are copies unless there is only one."""
    if len(adapters) == 1:
        return adapters[0]
    layers: dict[nn.Module, LowRank] = {}
    for module in dict.fromkeys(module for each in adapters for module in each.layers):
        parts = [each.layers[module] for each in adapters if module in each.layers]
        dtype = parts[0].a.dtype
        for part in parts[1:]:
            dtype = torch.promote_types(dtype, part.a.dtype)
        a = torch.cat([part.a.detach().to(dtype) for part in parts])
        b = torch.cat([part.b.detach().to(dtype) * part.scale for part in parts], dim=1)
        layers[module] = parts[0] if len(parts) == 1 else LowRank(a, b, 1.0)
    return Adapter(layers)
