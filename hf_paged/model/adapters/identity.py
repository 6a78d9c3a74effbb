"""Which content an adapter has (contract C24): a number, and another one as soon as it changes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch

from ..identity import Identity
from .lora import Adapter
from .peft_layers import LoraLayers


class AdapterSnapshot:
    """An adapter as it is now, to an `Identity` what a `ModelSnapshot` is."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        layers = adapter.layers
        self.facts = tuple([(id(module), part.scale, part.a.shape) for module, part in layers.items()])
        self.objects: dict[int, object] = {id(module): module for module in layers}

    def weights(self) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """Its tensors; none is in a file."""
        return self._tensors, ()

    @cached_property
    def _tensors(self) -> list[torch.Tensor]:
        return self.adapter.tensors


class AdapterStates:
    """The contents of some adapters of a model when they were looked at."""

    def __init__(self, identity: Identity, lora: LoraLayers, names: Iterable[str]) -> None:
        """Raises Unreadable if weights cannot be looked at."""
        self._identity = identity
        self._numbers: dict[str, tuple[int, int]] = {}
        """Of each adapter its content's number, and how often that had changed then."""
        for name in names:
            own = identity.of_adapter(name)
            number = own.prefix_key(AdapterSnapshot(lora.read(name)))
            self._numbers[name] = number, own.moves

    def key(self, names: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """What keys and values of these adapters together depend on, beside the model."""
        return tuple([(name, self._numbers.get(name, (0, 0))[0]) for name in names])

    def still(self, lora: LoraLayers) -> bool:
        """Whether the host sees no change of them."""
        return all(
            name in lora.names
            and self._identity.of_adapter(name).still(AdapterSnapshot(lora.read(name)), number, moves)
            for name, (number, moves) in self._numbers.items()
        )
