"""Which content an adapter has (contract C24): a number, and another one as soon as it changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..identity import Identity
from ..peft_layers import LoraLayers


class AdapterStates(NamedTuple):
    """The contents of some adapters of a model when they were looked at."""

    identity: Identity
    numbers: dict[str, tuple[int, int]]
    """Of each adapter its content's number, and how often that had changed then."""

    @classmethod
    def of(cls, identity: Identity, lora: LoraLayers, names: Iterable[str]) -> AdapterStates:
        """Raises Unreadable if weights cannot be looked at."""
        numbers = {}
        for name in names:
            own = identity.of_adapter(name)
            numbers[name] = own.prefix_key(lora.read(name)), own.moves
        return cls(identity, numbers)

    def key(self, names: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """The part of these adapters in the identity of keys and values, beside the model."""
        return tuple([(name, self.numbers.get(name, (0, 0))[0]) for name in names])

    def still(self, lora: LoraLayers) -> bool:
        """True if the host sees no change of them."""
        return all(
            name in lora.names and self.identity.of_adapter(name).still(lora.read(name), number, moves)
            for name, (number, moves) in self.numbers.items()
        )
