"""Additions of a LoRA adapter to a model's linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from .weights_digest import version_of


class LowRank(NamedTuple):
    """An adapter's addition to a layer's output: scale * (x a^T) b^T."""

    a: torch.Tensor
    """[rank, inputs]"""
    b: torch.Tensor
    """[outputs, rank]"""
    scale: float

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """scale * (x a^T) b^T, rounded as peft does."""
        linear = nn.functional.linear
        a, b = self.a.to(x.device), self.b.to(x.device)  # of layers on several devices, all lie on one
        return linear(linear(x.to(a.dtype), a), b) * self.scale


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter's low-rank products by layer, or those of several that are active together, in their order.
    Layers that it leaves as they are have none.
    """

    layers: Mapping[nn.Module, tuple[LowRank, ...]]

    @property
    def parts(self) -> list[LowRank]:
        """The products of all layers."""
        return list(chain.from_iterable(self.layers.values()))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All its weights."""
        return [tensor for part in self.parts for tensor in (part.a, part.b)]

    @property
    def facts(self) -> Any:
        """Facts that follow its settings; with `objects` and `weights` it is to an `Identity` what a
        `ModelSnapshot` is.
        """
        items = self.layers.items()
        return tuple([(id(module), part.scale, part.a.shape) for module, parts in items for part in parts])

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
        tensors = ((each, part.scale) for part in self.parts for each in (part.a, part.b))
        return tuple([(id(each), each.data_ptr(), version_of(each), scale) for each, scale in tensors])

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max((sum(len(part.a) for part in parts) for parts in self.layers.values()), default=0)

    @cached_property
    def bytes(self) -> int:
        """The memory of its weights."""
        return sum(tensor.nbytes for tensor in self.tensors)


def combine(adapters: Sequence[Adapter]) -> Adapter:
    """One adapter that adds what several add, one after the other. No weight is copied."""
    if len(adapters) == 1:
        return adapters[0]
    layers: dict[nn.Module, tuple[LowRank, ...]] = {}
    for module, parts in chain.from_iterable(each.layers.items() for each in adapters):
        layers[module] = (*layers.get(module, ()), *parts)
    return Adapter(layers)


def add_products(y: torch.Tensor, x: torch.Tensor, parts: Sequence[LowRank]) -> torch.Tensor:
    """A layer's output y for x with what adapters add, in the order and the number types of peft's forward
    with these active: the sum is rounded to y's type once, at the end.
    """
    total = y
    for part in parts:
        x = x.to(part.a.dtype)  # what the next one is given, too
        total = total + part.product(x)
    return total.to(y.dtype)


def merged(parts: Sequence[LowRank]) -> LowRank:
    """One product that adds what several add, up to rounding: the same memory if there is only one."""
    if len(parts) == 1:
        return parts[0]
    dtype = reduce(torch.promote_types, [part.a.dtype for part in parts])
    a = torch.cat([part.a.detach().to(dtype) for part in parts])
    b = torch.cat([part.b.detach().to(dtype) * part.scale for part in parts], dim=1)
    return LowRank(a, b, 1.0)
