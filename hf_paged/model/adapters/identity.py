"""Which content an adapter has (contract C24): a number, and another one as soon as it changes."""

from __future__ import annotations

from collections.abc import Iterable

from ..identity import Identity
from .peft_layers import LoraLayers


class AdapterStates:
    """The contents of some adapters of a model when they were looked at."""

    def __init__(self, identity: Identity, lora: LoraLayers, names: Iterable[str]) -> None:
        """Raises Unreadable if weights cannot be looked at."""
        self._identity = identity
        self._numbers: dict[str, tuple[int, int]] = {}
        """Of each adapter its content's number, and how often that had changed then."""
        for name in names:
            own = identity.of_adapter(name)
            number = own.prefix_key(lora.read(name))
            self._numbers[name] = number, own.moves

    def key(self, names: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """What keys and values of these adapters together depend on, beside the model."""
        return tuple([(name, self._numbers.get(name, (0, 0))[0]) for name in names])

    def still(self, lora: LoraLayers) -> bool:
        """Whether the host sees no change of them."""
        return all(
            name in lora.names and self._identity.of_adapter(name).still(lora.read(name), number, moves)
            for name, (number, moves) in self._numbers.items()
        )
