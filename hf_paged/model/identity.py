"""The state of a model that keys and values come from: another number after each change of them (C24)."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import Any, Literal, Protocol

import torch
from torch import nn

from ..kv import fork_safe_lock
from .peft_layers import BASE
from .snapshot import ModelSnapshot, StateKey, torch_settings
from .weights_digest import Contents, tensor_facts

Trust = Literal["masks", "trial", "none"]
"""Why a prompt's end may be computed behind a cached beginning: causal masks, or a trial; or why not."""
STATES = 16
"""So many states of a model are told apart and known again, as when adapters take turns."""
ADAPTERS = 256
"""So many adapters of a model are known again."""


class Snapshot(Protocol):
    """A model, or an adapter of one, as it was at a moment."""

    @property
    def facts(self) -> Any:
        """The facts compared beside weights."""

    @property
    def objects(self) -> dict[int, object]:
        """The objects among the facts, by id."""

    def weights(self) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """The tensors that it computes with, and facts about files."""


class Identity:
    """Numbers for the states of one model, or of one adapter. A number is never used for two contents of
    its weights.

    Settings (which adapters are on, their scales, a config's entries) may come back and have their number
    again. Weights that changed, in whatever way, never do. Several threads may ask at once: engines on one
    model, calls of generate().
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        """numbers: not given yet; an adapter's are given to no other one of the model."""
        self._lock = fork_safe_lock()
        self.secret = os.urandom(32)
        """A secret of this process, so that hashes of blocks cannot be computed beforehand."""
        self.changes = 0
        """How often the weights were seen to have changed."""
        self.answers_in_part = True
        """True if the model's answer to a part of a prompt is the end of its answer to all of it."""
        self.trust: dict[int, Trust] = {}
        """Of which states it is known whether a prompt's end can be computed without its beginning."""
        self.moves = 0
        """How often the state was found to be another one than before: it may be an earlier one again."""
        self._tensors: StateKey | None = None
        """The host's view of the tensors that `_contents` was read from."""
        self._contents: Contents | None = None
        self._states: list[tuple[StateKey, tuple[Any, ...], int]] = []
        self._numbers = numbers or count(1)
        self._adapters: OrderedDict[str, Identity] = OrderedDict()
        self._numbers_of_adapters = count(1)

    @property
    def turns(self) -> int:
        """After how many calls all weights were read again."""
        return 1 if self._contents is None else self._contents.turns

    def of_adapter(self, name: str) -> Identity:
        """The identity of an adapter of the model, whatever is called so; of one forgotten, begun anew."""
        with self._lock:
            found = self._adapters.setdefault(name, Identity(self._numbers_of_adapters))
            self._adapters.move_to_end(name)
            if len(self._adapters) > ADAPTERS:
                self._adapters.popitem(last=False)
            return found

    def prefix_key(self, snapshot: Snapshot, whole: bool = False) -> int:
        """The number of the model's state, once some of its weights are read, or all. Raises Unreadable."""
        with self._lock:
            tensors, files = snapshot.weights()
            contents = self._contents if self._are(tensors) else None
            if contents is None or not contents.same(contents.look(tensors, whole)):
                self.changes += 1
                self._tensors = self._contents = None
                self._contents = Contents(tensors)
                self._tensors = StateKey(tensor_facts(tensors), tensors)
            return self._number(snapshot, self._weights(files))

    def _weights(self, files: Any) -> tuple[Any, ...]:
        """Sources of keys and values beside settings: weights, and the arithmetic."""
        return self.changes, files, torch_settings()

    def _are(self, tensors: list[torch.Tensor]) -> bool:
        """True if the host sees these tensors as they were when they were read whole."""
        return self._tensors is not None and self._tensors.fits(tensor_facts(tensors))

    def _number(self, snapshot: Snapshot, weights: tuple[Any, ...]) -> int:
        for i, (settings, of, number) in enumerate(self._states):
            if of == weights and settings.fits(snapshot.facts):
                self.moves += i + 1 < len(self._states)
                self._states.append(self._states.pop(i))
                return number
        number = next(self._numbers)
        self.moves += 1
        self.trust.pop(number - 2 * STATES, None)
        settings = StateKey(snapshot.facts, snapshot.objects.values())
        self._states = [*self._states[1 - STATES :], (settings, weights, number)]
        return number

    def still(self, snapshot: Snapshot, number: int, moves: int) -> bool:
        """True if the model is surely still in the state `number`, and no change was seen since `moves`."""
        with self._lock:
            if not self._states:
                return False
            settings, weights, known = self._states[-1]
            if known != number or moves != self.moves or not settings.fits(snapshot.facts):
                return False
            tensors, files = snapshot.weights()
            return weights == self._weights(files) and self._are(tensors)


_identities: weakref.WeakKeyDictionary[nn.Module, Identity] = weakref.WeakKeyDictionary()
_beginning = fork_safe_lock()


def identity_of(model: nn.Module) -> Identity:
    """The model's identity, begun when first asked for."""
    with _beginning:
        if model not in _identities:
            _identities[model] = Identity()
        return _identities[model]


def identity_in(snapshot: ModelSnapshot) -> Identity:
    """The identity of what a snapshot is about: of a model that peft's own modules compute with, the model
    alone has another one than all of it.
    """
    own = identity_of(snapshot.model)
    return own.of_adapter(BASE) if snapshot.alone else own
