"""Which state of a model keys and values come from: a number, and another one as soon as anything changes
them (contract C24).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..kv import fork_safe_lock
from .offloaded import offloaded, stored
from .quantized import looks_around, scales_of
from .switch import original_implementation
from .weights_digest import PLAIN_TENSORS, Contents, Reading, Tags

PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
INTERNAL = frozenset(nn.Module().__dict__) - {"training"} | {
    "generation_config",
    "_output_capturing_hooks_installed",
}
"""What every module has (its tensors and hooks are looked at by themselves), and what changes nothing that is
computed.
"""
BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose angles depend on the longest row."""
OURS = frozenset({"_attn_implementation_internal"})
"""Settings of a config that a running call changes."""
Trust = Literal["masks", "trial", "none"]
"""Why the end of a prompt may be computed behind a cached beginning: all masks are causal, or it was tried;
or why not.
"""
STATES = 16
"""So many states of a model are told apart and known again, as when adapters take turns."""


class Survey(NamedTuple):
    """All that Python decides in a model: plain facts, the objects among them, and its tensors."""

    facts: tuple[Any, ...]
    objects: list[Callable[[], object]]
    tensors: list[torch.Tensor]
    hooked: list[nn.Module]
    """The modules inside the model that have hooks."""
    turns_with_length: bool
    """Whether a rotary embedding takes other angles when a row is long."""
    looks_around: bool
    """Whether a quantized layer rounds a token by the others of its batch."""

    @classmethod
    def of(cls, model: nn.Module, forward: Callable[..., Any]) -> Survey:
        """Look at every module, its settings, its config's and its class's; `forward` is what the model
        itself runs.
        """
        survey = _Survey()
        facts = tuple(survey.of_model(model, forward))
        # Objects come by number, and whoever keeps the facts keeps an eye on the objects.
        turns = any(one in str(survey.rope) for one in BY_LENGTH)
        return cls(facts, survey.objects, survey.tensors, survey.hooked, turns, survey.looks_around)

    @property
    def valid(self) -> bool:
        """Whether every object that was seen is still there: afterwards another may go by its number."""
        return all(known() is not None for known in self.objects)


class _Survey:
    """A walk over a model, which every call takes: it does no more than it must."""

    def __init__(self) -> None:
        self.objects: list[Callable[[], object]] = []
        self.tensors: list[torch.Tensor] = []
        self.hooked: list[nn.Module] = []
        self.rope: list[object] = []
        self.looks_around = False

    def of_model(self, model: nn.Module, forward: Callable[..., Any]) -> list[Any]:
        facts: list[Any] = [self._object(getattr(forward, "__func__", forward))]
        configs: dict[int, Any] = {}
        kinds: dict[type, None] = {}
        tensors: list[torch.Tensor | None] = []
        modules = _modules(model)
        elsewhere = offloaded(modules)
        for module in modules:
            own = module.__dict__
            kinds[type(module)] = None
            names, values_of = _told(
                tuple(own) if module is not model else tuple(name for name in own if name != "forward")
            )
            values = values_of(own)
            facts += (
                names,
                values
                if PLAIN.issuperset(map(type, values))
                else tuple([self._fact(value) for value in values]),
            )
            if "config" in own:
                configs[id(own["config"])] = own["config"]
            if "rope_type" in own:
                self.rope.append(own["rope_type"])
            if id(module) in elsewhere:
                tensors.extend(elsewhere[id(module)].resident(module))
            else:
                tensors.extend(own["_parameters"].values())
                tensors.extend(own["_buffers"].values())
            if (own["_forward_pre_hooks"] or own["_forward_hooks"]) and module is not model:
                self.hooked.append(module)
        self.tensors += [tensor for tensor in tensors if tensor is not None]
        if elsewhere:
            kept = stored(modules, elsewhere)
            self.tensors += kept.tensors
            facts += kept.files
        if not PLAIN_TENSORS.issuperset(map(type, self.tensors)):
            self._look_inside(modules)
        for config in configs.values():
            facts += (self._object(config), original_implementation(config))
            facts += [
                self._fact(value)
                for name, value in getattr(config, "__dict__", {}).items()
                if name not in OURS
            ]
        for kind in kinds:
            facts += (self._object(kind), self._object(getattr(kind, "forward", None)))
        return facts

    def _look_inside(self, modules: list[nn.Module]) -> None:
        """Note what quantized tensors keep elsewhere."""
        for module in modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and type(tensor) not in PLAIN_TENSORS:
                    self.tensors += scales_of(module, tensor)
                    self.looks_around |= looks_around(module, tensor)

    def _fact(self, value: Any, depth: int = 0) -> Any:
        """Something hashable that is equal as long as the value is."""
        kind = type(value)  # not isinstance: a config looks every question up in itself
        if kind in PLAIN:
            return value
        if issubclass(kind, torch.Tensor):
            self.tensors.append(value)
            return value.shape, value.dtype
        if depth < 3 and issubclass(kind, (list, tuple, set, frozenset)):
            return tuple([self._fact(part, depth + 1) for part in value])
        if depth < 3 and issubclass(kind, dict):
            return tuple([(self._fact(key, 3), self._fact(part, depth + 1)) for key, part in value.items()])
        return self._object(value)

    def _object(self, value: object) -> int:
        try:
            self.objects.append(weakref.ref(value))
        except TypeError:
            self.objects.append(lambda: value)
        return id(value)


@lru_cache(maxsize=4096)
def _told(names: tuple[str, ...]) -> tuple[tuple[str, ...], Callable[[dict[str, Any]], tuple[Any, ...]]]:
    """Those of a module's attributes that are neither every module's nor its config, and how to get them:
    many modules have the same.
    """
    told = tuple(name for name in names if name not in INTERNAL and name != "config")
    return told, itemgetter(*told) if len(told) > 1 else lambda own: tuple(own[name] for name in told)


def _modules(model: nn.Module) -> list[nn.Module]:
    """Every module once; torch's own walk makes up names."""
    seen, found = {id(model)}, [model]
    for module in found:  # which grows meanwhile
        for child in module.__dict__["_modules"].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


class Glance(NamedTuple):
    """A look at a model that has begun: what Python sees of it, and what its device is still reading."""

    survey: Survey
    readings: list[Reading] | None
    """None if the host saw a change already, so that nothing was left to compare."""
    contents: Contents | None
    """What they are to be compared with."""


class Identity:
    """Numbers for the states of one model. A number is never used for two contents of its weights.

    Settings (which adapters are on, their scales, a config's entries) may come back and have their number
    again. Weights that changed, in whatever way, never do. Several threads may look at once: engines on one
    model, calls of generate().
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self.secret = os.urandom(32)
        """What only this process knows: nobody can work out names of blocks beforehand."""
        self.changes = 0
        """How often the weights were seen to have changed."""
        self.answers_in_part = True
        """Whether the model's answer to a part of a prompt is the end of its answer to all of it."""
        self.trust: dict[int, Trust] = {}
        """Of which states it is known whether a prompt's end can be computed without its beginning."""
        self._tags: Tags | None = None
        self._contents: Contents | None = None
        self.moves = 0
        """How often the state was found to be another one than before: it may be an earlier one again."""
        self._states: list[tuple[Survey, int, int]] = []
        self._numbers = 0

    @property
    def turns(self) -> int:
        """After how many calls all weights were read again."""
        return 1 if self._contents is None else self._contents.turns

    def begin(self, model: nn.Module, forward: Callable[..., Any]) -> Glance:
        """Begin to look at the model; raises Unreadable if that cannot be done."""
        with self._lock:
            return self._look(Survey.of(model, forward))

    def _look(self, survey: Survey) -> Glance:
        if self._tags is None or self._contents is None or not self._tags.fit(survey.tensors):
            return Glance(survey, None, self._contents)
        return Glance(survey, self._contents.look(survey.tensors), self._contents)

    def number(self, glance: Glance) -> int:
        """The number of the state that was looked at."""
        with self._lock:
            return self._number(glance)

    def _number(self, glance: Glance) -> int:
        if glance.contents is not self._contents:
            glance = self._look(glance.survey)  # somebody else has noted what the weights hold since
        if glance.readings is None or self._contents is None or not self._contents.same(glance.readings):
            self._renew(glance.survey)
        for i, (survey, changes, number) in enumerate(self._states):
            if changes == self.changes and survey.facts == glance.survey.facts and survey.valid:
                self.moves += i + 1 < len(self._states)
                self._states.append(self._states.pop(i))
                return number
        self._numbers += 1
        self.moves += 1
        self.trust.pop(self._numbers - 2 * STATES, None)
        self._states = [
            *self._states[1 - STATES :],
            (glance.survey._replace(tensors=[], hooked=[]), self.changes, self._numbers),
        ]
        return self._numbers

    def still(self, survey: Survey, number: int, moves: int) -> bool:
        """Whether the host sees no change since the model was found in the state `number`, nor has seen one
        since `moves`.
        """
        with self._lock:
            last, changes, known = self._states[-1]
            return (
                known == number and moves == self.moves and changes == self.changes and self._tags is not None
                and survey.facts == last.facts and last.valid and self._tags.fit(survey.tensors)
            )  # fmt: skip

    def _renew(self, survey: Survey) -> None:
        """The weights are others than they were: note what they hold now."""
        self.changes += 1
        self._tags = self._contents = None
        self._contents = Contents(survey.tensors)
        self._tags = Tags(survey.tensors)


_identities: weakref.WeakKeyDictionary[nn.Module, Identity] = weakref.WeakKeyDictionary()
_beginning = fork_safe_lock()


def identity_of(model: nn.Module) -> Identity:
    """The model's identity, begun when first asked for."""
    with _beginning:
        if model not in _identities:
            _identities[model] = Identity()
        return _identities[model]
