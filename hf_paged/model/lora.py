"""An adapter of a model: a part at each module that it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn

from .parts import LowRank, Part
from .peft_parts import base_of
from .weights_digest import version_of

__all__ = ["Adapter", "LowRank", "Part", "add_parts", "combine", "require_together"]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter's parts by module, or those of several that are active together, in their order. Modules
    that it leaves as they are have none.
    """

    layers: Mapping[nn.Module, tuple[Part, ...]]

    @property
    def parts(self) -> list[Part]:
        """The parts at all modules."""
        return list(chain.from_iterable(self.layers.values()))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All its weights; one that several modules share once."""
        found = chain.from_iterable(part.tensors for part in self.parts)
        return list({id(tensor): tensor for tensor in found}.values())

    @property
    def bases(self) -> list[torch.Tensor]:
        """The weights of the model that its parts are computed from."""
        items = self.layers.items()
        read = [base_of(module) for module, parts in items if any(part.reads_base for part in parts)]
        return [tensor for base in read for tensor in base.parameters()]

    @property
    def facts(self) -> Any:
        """Facts that follow its settings; with `objects` and `weights` it is to an `Identity` what a
        `ModelSnapshot` is.
        """
        items = self.layers.items()
        return tuple([(id(module), part.settings) for module, parts in items for part in parts])

    @property
    def objects(self) -> dict[int, object]:
        """The modules that it changes, by id."""
        return {id(module): module for module in self.layers}

    def weights(self) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """The tensors that it is computed from; none is in a file."""
        return [*self.tensors, *self.bases], ()

    @property
    def versions(self) -> tuple[Any, ...]:
        """These tensors, where they lie, how often torch has counted a write to them, and its settings."""
        found: list[Any] = []
        read: list[torch.Tensor] = []
        for module, parts in self.layers.items():
            for part in parts:
                found.append(part.settings)
                read += part.tensors
                if part.reads_base:
                    read += base_of(module).parameters()
        found += [(id(each), each.data_ptr(), version_of(each)) for each in read]
        return tuple(found)

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max((sum(part.rank for part in parts) for parts in self.layers.values()), default=0)

    @cached_property
    def bytes(self) -> int:
        """The memory of its weights."""
        return sum(tensor.nbytes for tensor in self.tensors)


def combine(adapters: Sequence[Adapter]) -> Adapter:
    """One adapter that does what several do, one after the other. No weight is copied."""
    if len(adapters) == 1:
        return adapters[0]
    layers: dict[nn.Module, tuple[Part, ...]] = {}
    for module, parts in chain.from_iterable(each.layers.items() for each in adapters):
        layers[module] = (*layers.get(module, ()), *parts)
    return Adapter(layers)


def require_together(adapters: Mapping[str, Adapter]) -> None:
    """Raise ValueError for adapters, by name, with parts of which one alone can be active at a module."""
    for module in combine(list(adapters.values())).layers:
        parts = [(name, part) for name, each in adapters.items() for part in each.layers.get(module, ())]
        only = [(name, part) for name, part in parts if part.alone]
        if len(dict(only)) > 1:
            names = " and ".join(map(repr, dict(only)))
            what = " and ".join(dict.fromkeys(part.name for _, part in only))
            raise ValueError(
                f"the adapters {names} have {what} at one {type(base_of(module)).__name__}, of which one "
                "alone can be active; name one of them"
            )


def add_parts(module: nn.Module, y: torch.Tensor, x: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """A module's output y for x with what adapters do to it, in the order and the number types of peft's
    forward with these active: it is rounded to y's type once, at the end.
    """
    total = y
    base = base_of(module)
    for part in parts:
        x = part.given(x)  # and what the next one is given, too
        total = part.apply(base, x, total)
        base = part.base_behind(base)
    return total.to(y.dtype)
