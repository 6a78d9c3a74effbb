"""Checks that a model is still the same: for captured steps, cached keys and values, running requests.

LoRA adapters are no part of the model where they can be taken apart from it: each has an identity of its own,
which is one more part of the keys of the rows that have it (adapters/identity.py).
Weights that step in place keep `graph_key` and get a new prefix key (identity.py). Tensor-parallel ranks must
share one rank's verdict: each sees its own shards, and identities and numbers are the process's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial
from itertools import chain, repeat, takewhile
from operator import attrgetter, is_, itemgetter
from types import CellType, FunctionType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..kv.reference import invariant
from . import patches
from .offloaded import divided, offloaded, stored
from .peft_layers import MODEL_SETTINGS, OF_PEFT, OWN_SETTINGS, LoraLayers, adapter_names_of
from .peft_parts import wraps_around
from .quantized import holders_of, is_quantized, looks_around, scales_of
from .source import STANDS_FOR
from .switch import modules_of, original_implementation
from .training import training_effect
from .weights_digest import Unreadable, memory_of_parts, storages_of, versions_of

PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
INTERNAL = frozenset(nn.Module().__dict__) - {"training"} | {
    "generation_config",
    "_output_capturing_hooks_installed",
    "_cached_continuous_batching_manager",
    "_hf_paged_engine",
    "_require_grads_hook",
    "_require_grads_hooks",
}
"""Attributes of every module (tensors, parts and hooks are compared apart), and those that no forward reads.
"""
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
TENSORS = ("_parameters", "_buffers")
CONTAINERS = (list, tuple, set, frozenset, dict)
DEPTH = 3
"""How deep containers in settings are read."""
BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose angles depend on the longest row."""
KEYS = 8
"""Graph keys that are kept for a model."""
NOTHING = object()
Getter = Callable[[dict[str, Any]], tuple[Any, ...]]
_dict_of = attrgetter("__dict__")
_parts_of = itemgetter("_modules", *TENSORS, *HOOKS)
_dtype_of = attrgetter("dtype")


class StateKey:
    """Facts about a model, the same as equal ones while each object among them, known by its id, is alive.

    Of tensors the memory is watched: a key leaves no mark on a model's weights.
    """

    __slots__ = ("_alive", "_facts", "_kept", "_storages")

    def __init__(self, facts: Any, objects: Iterable[object]) -> None:
        self._facts = facts
        self._storages: list[StorageWeakRef] = []
        several: list[object] = []
        for each in objects:
            if _is_tensor(each):
                self._storages += storages_of(each)
            else:
                several.append(each)
        self._alive = [weakref.ref(each) for each in several if type(each).__weakrefoffset__]
        self._kept = [each for each in several if not type(each).__weakrefoffset__]

    def fits(self, facts: Any) -> bool:
        """True if the facts of now are these."""
        if self._facts != facts:
            return False
        gone = [known() is None for known in self._alive]
        freed = [storage.expired() for storage in self._storages]
        return not (any(gone) or any(freed))

    def same(self, other: StateKey) -> bool:
        """True if both say the same of objects that are still there."""
        return self is other or (self.fits(other._facts) and other.fits(self._facts))


_graph_keys: weakref.WeakKeyDictionary[nn.Module, list[StateKey]] = weakref.WeakKeyDictionary()


class ModelSnapshot:
    """A model as it is now: its settings, parts, code, hooks and tensors, from one walk over its modules.

    A snapshot keeps the model alive; its keys do not. With `watch` it keeps every object that it saw and its
    place, so that `unchanged` need not read anything again.
    """

    def __init__(self, model: nn.Module, watch: bool = False, alone: bool = False) -> None:
        """alone: the model without its adapters, whoever computes these, if that is possible."""
        self.model = model
        self.modules = modules_of(model)
        self.lora = LoraLayers(self.modules)
        """Adapters in the model. Where they are apart from it, nothing else of this is about them."""
        self._wanted_alone = alone
        self.alone = alone and self.lora.beside
        """True if nothing but `lora` is about adapters, though peft's own modules compute some of them."""
        if self.alone:
            self.modules = self.lora.without_tuners(model)
        elif self.lora.apart:
            self.modules = self.lora.without_adapters(self.modules)
        self.hooked: list[nn.Module] = []
        """The modules inside the model that have hooks."""
        self.objects: dict[int, object] = {}
        """Those that the facts know by their ids."""
        self._settings: list[tuple[tuple[str, ...], tuple[Any, ...]]] = []
        """Of every module the names of its settings, and facts about them."""
        self._configs: dict[int, Any] = {}
        self._nested: dict[int, dict[str, Any]] = {}
        """Attributes of objects that are settings."""
        self._tensors: list[torch.Tensor] = []
        """Tensors among the settings."""
        self._types = list(map(type, self.modules))
        self._elsewhere = offloaded(self.modules)
        moves = self._elsewhere or divided(self._types)
        self.steady = not (hooks_everywhere() or moves or training_effect(self.modules))
        """True if a replay computes all that the model computes: no hooks of the user, no active dropout."""
        self.facts = self._walk()
        """The facts beside tensors that decide cached keys and values."""
        self._places = _Places(self) if watch else None

    # ---- the walk

    def _walk(self) -> tuple[Any, ...]:
        found: list[Any] = [None if self.alone else self.lora.why_not]
        apart = self.lora.apart or self.alone
        for module in self.modules:
            own = module.__dict__
            names, values_of = _settings_of(
                tuple(own), apart and (module is self.model or not OF_PEFT.isdisjoint(own))
            )
            values = values_of(own)
            if not PLAIN.issuperset(map(type, values)):
                values = tuple([self._fact(value) for value in values])
            self._settings.append((names, values))
            if "config" in own:
                self._configs[id(own["config"])] = own["config"]
                found.append(self._object(own["config"]))
            if "forward" in own and (forward := patches.own_forward(module)) is not None:
                found += (len(self._settings), self._object(forward), *map(self._fact, _bound(forward)))
            if own["_forward_pre_hooks"] or own["_forward_hooks"]:
                self._note_hooks(module)
        for config in self._configs.values():
            found.append(original_implementation(config))
            found += [self._fact(value) for value in _values(getattr(config, "__dict__", {}))]
        for kind in dict.fromkeys(self._types):
            found += (self._object(kind), self._object(getattr(kind, "forward", None)))
        return tuple(self._settings), tuple(found)

    def _fact(self, value: Any, depth: int = 0) -> Any:
        """Something hashable that is equal as long as the value is."""
        kind = type(value)  # not isinstance: a config looks every question up in itself
        if kind in PLAIN:
            return value
        if issubclass(kind, torch.Tensor):
            self._tensors.append(value)
            return value.shape, value.dtype
        if depth < DEPTH and issubclass(kind, dict):
            found = [(self._fact(key, DEPTH), self._fact(part, depth + 1)) for key, part in value.items()]
            return tuple(found)
        if depth < DEPTH and issubclass(kind, CONTAINERS):
            return tuple([self._fact(part, depth + 1) for part in value])
        if depth == 0 and not callable(value) and hasattr(value, "__dict__"):
            self._nested[id(value)] = value.__dict__
        return self._object(value)

    def _object(self, value: object) -> int:
        self.objects[id(value)] = value
        return id(value)

    def _note_hooks(self, module: nn.Module) -> None:
        if module is not self.model:
            self.hooked.append(module)
        hooks = chain.from_iterable(module.__dict__[kind].values() for kind in HOOKS)
        # Which adapter each row has comes to a layer from peft, and to a captured step in another way.
        self.steady &= all(
            patches.only_observes(hook) or (self.lora.apart and adapter_names_of(hook) is not None)
            for hook in hooks
        )

    # ---- what it says

    @cached_property
    def graph_key(self) -> StateKey:
        """The assumptions of a captured step: everything that Python decides, and where tensors lie.

        Weights may be written in place, since a replay reads them anew. Code and addresses are read when the
        key is first asked for. What a function reads that only another function calls is not part of it, nor
        is an object inside an object. Equal keys of a model are one object.
        """
        _, sources = code_of(self._types)
        values = [*chain(*map(_values, self._nested.values()), *[source() for source in sources])]
        parts = [value if type(value) in PLAIN else id(value) for value in values]
        own = [module.__dict__[part].values() for module in self.modules for part in TENSORS]
        beside = [*self._tensors, *self._scales(), *filter(_is_tensor, values)]
        where = _layouts(chain(*own, beside, memory_of_parts(chain(*own))))
        facts = self.facts, tuple(parts), where, torch_settings(), self.steady
        known = _graph_keys.get(self.model, [])
        for key in known:
            if key.fits(facts):
                return key
        key = StateKey(facts, [*self.objects.values(), *values])
        _graph_keys[self.model] = [*known[1 - KEYS :], key]
        return key

    def weights(self) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """The tensors that the model computes with, wherever they are stored, and facts about files.

        Raises Unreadable if a place cannot be compared.
        """
        tensors = self.reads()
        if not self._elsewhere:
            return tensors, ()
        kept = stored(self.modules, self._elsewhere)
        return tensors + kept.tensors, tuple(kept.files)

    def reads(self) -> list[torch.Tensor]:
        """The tensors in the model that a forward may read: parameters, buffers, settings, scales.

        A rehearsal knows them, a graph's key has their places, and a look compares their content.
        """
        return list(
            {id(each): each for each in chain(self.resident(), self._tensors, self._scales())}.values()
        )

    def resident(self) -> list[torch.Tensor]:
        """The parameters and buffers that lie in modules, without those that are loaded for a forward."""
        owns = [module.__dict__ for module in self.modules if id(module) not in self._elsewhere]
        found = [tensor for own in owns for part in TENSORS if own[part] for tensor in own[part].values()]
        for module in self.modules if self._elsewhere else ():
            if id(module) in self._elsewhere:
                found += self._elsewhere[id(module)].resident(module)
        return [tensor for tensor in found if tensor is not None]

    def parameters(self) -> Any:
        """Of every parameter which one it is now, where it lies, and how often torch wrote to it."""
        found: Any = _tags(chain.from_iterable(self._parameters))
        if self._wrapped:
            found = found, _tags(memory_of_parts(self._wrapped)), _tags(self._first_scales)
        if not self._elsewhere:
            return found
        try:
            kept = stored(self.modules, self._elsewhere)
        except Unreadable:
            return found, None
        return found, _tags(kept.tensors), kept.files

    @cached_property
    def _parameters(self) -> list[Iterable[torch.Tensor | None]]:
        resident = [module._parameters for module in self.modules if id(module) not in self._elsewhere]
        return [parameters.values() for parameters in resident if parameters]

    @cached_property
    def _wrapped(self) -> list[torch.Tensor]:
        """The parameters of a quantized or divided model: some consist of other tensors, which torch counts
        writes to by themselves.
        """
        several = [each for each in chain.from_iterable(self._parameters) if each is not None]
        return several if any(map(is_quantized, several)) else []

    @cached_property
    def _first_scales(self) -> list[torch.Tensor]:
        """The scales that were there when they were first asked for."""
        return self._scales()

    def _scales(self) -> list[torch.Tensor]:
        """The scales that quantized weights are read with now, where they are no parameters or buffers."""
        return [scale for module, weight in self._quantized() for scale in scales_of(module, weight)]

    def set_since(self, before: ModelSnapshot) -> patches.SelfWritten:
        """The settings that differ from those before, by kind of module. Modules with buffers are left out:
        they may note in a forward how long it was (rotary positions).
        """
        known = dict(zip(map(id, before.modules), before._settings, strict=True))
        wrappers = self._wrappers()
        found: set[tuple[type, str]] = set()
        for module, kind, settings in zip(self.modules, self._types, self._settings, strict=True):
            was = known.get(id(module), ((), ()))
            if was != settings and not self.writes_itself(module) and id(module) not in wrappers:
                old = dict(zip(*was, strict=True))
                new = dict(zip(*settings, strict=True))
                names = [name for name in old | new if old.get(name, NOTHING) != new.get(name, NOTHING)]
                found.update((kind, name) for name in names)
        return frozenset(found)

    def same_modules(self, other: ModelSnapshot) -> bool:
        """True if both have the same modules. A LoRA layer counts as the layer that it is wrapped around:
        adapters come and go beside the model.
        """
        return self._base() == other._base()

    def _base(self) -> set[int]:
        return set(map(id, self.modules)) - self._wrappers()

    def _wrappers(self) -> set[int]:
        """The modules of peft, by id, where adapters are apart from the model."""
        layers = self.lora.layers if self.lora.apart else []
        return {id(each) for layer in layers for each in wraps_around(layer)}

    def writes_itself(self, module: nn.Module) -> bool:
        """True if a forward may set the module's settings."""
        return module is not self.model and bool(module._buffers)

    def unchanged(self) -> bool:
        """True if the model is surely as `graph_key` says."""
        return self._places is not None and self._places.unchanged()

    def same_settings(self) -> bool:
        """True if the settings that no forward sets, and all modules' parts, are surely the same objects."""
        return self._places is not None and self._places.same_settings()

    def current(self) -> ModelSnapshot:
        """This snapshot if the model is unchanged, else a new one that is watched."""
        return self if self.unchanged() else ModelSnapshot(self.model, watch=True, alone=self._wanted_alone)

    @property
    def turns_with_length(self) -> bool:
        """True if a rotary embedding takes other angles when a row is long."""
        kinds = str([module.__dict__.get("rope_type") for module in self.modules])
        return any(kind in kinds for kind in BY_LENGTH)

    @property
    def looks_around(self) -> bool:
        """True if a quantized layer rounds a token by the others of its batch."""
        return any(looks_around(module, tensor) for module, tensor in self._quantized())

    def _quantized(self) -> Iterator[tuple[nn.Module, torch.Tensor]]:
        for module in self.modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and is_quantized(tensor):
                    yield module, tensor


# ---- the same objects in the same places


class _Places:
    """The objects that a snapshot was read from, and whether each is still in its place.

    Objects are compared by identity: a tensor would answer `==` with a tensor.
    """

    def __init__(self, snapshot: ModelSnapshot) -> None:
        self._modules = snapshot.modules
        self._types = snapshot._types
        self._owns = list(map(_dict_of, self._modules))
        self._forwards = [module for module in self._modules if "forward" in module.__dict__]
        self._configs = list(snapshot._configs.values())
        self._attributes = snapshot._tensors
        self._lora = snapshot.lora
        self._alone = snapshot.alone
        self._parts = list(map(_parts_of, self._owns))
        self._empty = [part for part in chain.from_iterable(self._parts) if not part]
        self._tensors = [own[part] for own in self._owns for part in TENSORS if own[part]]
        self._wrapped = snapshot._wrapped
        self._settings, self._others = self._held(snapshot)
        self._before = self._now()

    def _held(self, snapshot: ModelSnapshot) -> tuple[_Held, _Held]:
        """The settings that no forward sets, and everything else."""
        self_written = patches.self_written_of(snapshot.model)
        # Modules of a kind have the same attributes, so few getters are needed.
        groups: dict[tuple[type, tuple[str, ...], bool, bool], list[dict[str, Any]]] = {}
        for module, own, kind, (names, _) in zip(
            self._modules, self._owns, self._types, snapshot._settings, strict=True
        ):
            groups.setdefault((kind, names, snapshot.writes_itself(module), "config" in own), []).append(own)
        settings = _Held()
        others = _Held()
        for (kind, names, writes, has_config), owns in groups.items():
            watched = [name for name in names if not writes and (kind, name) not in self_written]
            settings.add_values(watched, owns)
            rest = [name for name in names if name not in watched]
            others.add_values([*rest, "config"] if has_config else rest, owns)
        settings.sized += self._owns
        if self._alone:
            settings.add_values(["merged_adapters"], snapshot.lora.notes_of_merges)
        settings.add([own["_modules"] for own in self._owns if own["_modules"]])
        others.add([own[part] for own in self._owns for part in HOOKS if own[part]])
        objects = [getattr(config, "__dict__", {}) for config in self._configs]
        for module, weight in snapshot._quantized():
            objects += map(vars, holders_of(module, weight))
        for own in (*objects, *snapshot._nested.values()):
            others.add_values([name for name in own if name not in patches.SETTINGS], [own])
            others.sized.append(own)
        forwards = [partial(_bound, own) for own in map(patches.own_forward, self._forwards) if _bound(own)]
        others.sources += forwards
        others.add(_containers(chain.from_iterable(bound() for bound in forwards)))
        classes, sources = code_of(self._types)
        others.sized += classes
        others.sources += sources
        return settings.note(), others.note()

    def same_settings(self) -> bool:
        try:
            return self._settings.same()
        except (KeyError, RuntimeError):  # an attribute is gone, or changes in another thread
            return False

    def unchanged(self) -> bool:
        try:
            return (
                self._settings.same()
                and self._others.same()
                and _same(self._owns, map(_dict_of, self._modules))
                and _same(self._types, map(type, self._modules))
                and list(map(_parts_of, self._owns)) == self._parts
                and not any(self._empty)
                and self._now() == self._before
            )
        except (KeyError, AttributeError, RuntimeError):
            return False

    def _now(self) -> list[Any]:
        """Facts compared by value."""
        return [
            list(map(len, self._tensors)),
            _layouts(chain.from_iterable([part.values() for part in self._tensors])),
            _layouts(memory_of_parts(self._wrapped)),
            _layouts(self._attributes),
            list(map(original_implementation, self._configs)),
            [id(patches.own_forward(module)) for module in self._forwards],
            self._lora.why_whole_now() if self._alone else self._lora.apart and self._lora.why_not_now(),
            torch_settings(),
            hooks_everywhere(),
        ]


class _Held:
    """Dicts, lists and other sources, and the objects that came from them."""

    def __init__(self) -> None:
        self.sized: list[Sized] = []
        self.sources: list[Callable[[], Iterable[Any]]] = []
        self._views: list[Iterable[Any]] = []

    def add_values(self, names: list[str], owns: list[dict[str, Any]]) -> None:
        """The values of some names in dicts, and the contents of the containers among them."""
        if not names:
            return
        get = itemgetter(*names) if len(names) > 1 else itemgetter(names[0], names[0])  # a tuple, always
        self.sources.append(lambda: chain.from_iterable(map(get, owns)))
        found = {id(each): each for each in _containers(self.sources[-1]())}
        self.add(found.values())
        self._views += found.values()  # of dicts the keys

    def add(self, containers: Iterable[Any]) -> None:
        for each in containers:
            self.sized.append(each)
            self._views.append(each.values() if isinstance(each, dict) else each)

    def note(self) -> _Held:
        """Note the objects of now."""
        self._sizes = list(map(len, self.sized))
        self._objects = list(self._now())
        return self

    def same(self) -> bool:
        return list(map(len, self.sized)) == self._sizes and _same(self._objects, self._now())

    def _now(self) -> Iterator[Any]:
        found = [source() for source in self.sources]
        return chain(chain.from_iterable(found), chain.from_iterable(self._views))


def code_of(kinds: Iterable[type]) -> tuple[list[Any], list[Callable[[], Iterable[Any]]]]:
    """The code of classes of modules, not torch's own: dicts of the classes, sources of what it names."""
    bases = dict.fromkeys(base for kind in dict.fromkeys(kinds) for base in in_own_code(kind))
    classes = [vars(base) for base in bases]
    members = [own.values() for own in classes]
    functions = [each for value in chain.from_iterable(members) for each in patches.wrapped_in(value)]
    names: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
    for function in functions:
        file = function.__globals__
        names.setdefault(id(file), (file, {}))[1].update(dict.fromkeys(function.__code__.co_names))
    cells = [cell for function in functions for cell in function.__closure__ or ()]
    sources: list[Callable[[], Iterable[Any]]] = [
        partial(chain.from_iterable, members),
        partial(map, attrgetter("__code__"), functions),
        partial(map, _content, cells),
    ]
    for file, named in names.values():
        called = {name: None for name in named if isinstance(file.get(name), FunctionType)}
        others = [name for name in named if name not in called]
        sources += [partial(map, file.get, others, repeat(NOTHING)), partial(_stock_of, file, list(called))]
    return classes, sources


def _stock_of(file: dict[str, Any], names: list[str]) -> Iterable[Any]:
    """The functions of a file; where one of ours is in the place of another meanwhile, that other."""
    functions = [file.get(name, NOTHING) for name in names]
    return map(getattr, functions, repeat(STANDS_FOR), functions)


def in_own_code(kind: type) -> list[type]:
    """The classes of which a class of modules has its code, without torch's own, which stays as it is."""
    return list(takewhile(lambda base: not base.__module__.startswith("torch."), kind.__mro__))


def hooks_everywhere() -> bool:
    """True if all modules of the process have hooks."""
    everywhere = nn.modules.module
    return bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


def torch_settings() -> tuple[Any, ...]:
    """How torch multiplies float32, whether it is deterministic, whether bits may depend on the batch, and
    what this thread's autocast rounds to.
    """
    matmul = torch.backends.cuda.matmul
    try:
        precision = matmul.fp32_precision
    except (AttributeError, RuntimeError):  # an older torch, or a program that uses both names of the setting
        precision = matmul.allow_tf32
    rounds = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
    return precision, torch.are_deterministic_algorithms_enabled(), invariant.get(), *rounds


@lru_cache(maxsize=4096)
def _settings_of(names: tuple[str, ...], adapted: bool) -> tuple[tuple[str, ...], Getter]:
    """Which of a module's attributes are its settings, and how to get them: many modules have the same.

    adapted: whether some of them are about adapters that are apart from the model.
    """
    others = INTERNAL | {"config", "forward"} | (OWN_SETTINGS | MODEL_SETTINGS if adapted else frozenset())
    found = tuple(name for name in names if name not in others)
    return found, itemgetter(*found) if len(found) > 1 else lambda own: tuple(own[name] for name in found)


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    # Not isinstance: a config looks every question up in itself.
    return issubclass(type(value), torch.Tensor)


def _values(own: dict[str, Any]) -> list[Any]:
    return [value for name, value in own.items() if name not in patches.SETTINGS]


def _containers(values: Iterable[Any], depth: int = 0) -> Iterator[Any]:
    """The lists and dicts among values, and those in them, as deep as facts go."""
    for value in values:
        if depth < DEPTH and isinstance(value, CONTAINERS):
            yield value
            yield from _containers(value.values() if isinstance(value, dict) else value, depth + 1)


def _same(before: Iterable[Any], now: Iterable[Any]) -> bool:
    """True if these are the very same objects; that they are as many is known."""
    return all(map(is_, before, now))


def _tags(several: Iterable[torch.Tensor | None]) -> tuple[list[int], list[int], list[int]]:
    """Which tensors these are, where they lie, and how often torch wrote to them. In bulk, for every step."""
    tensors = [tensor for tensor in several if tensor is not None]
    return list(map(id, tensors)), list(map(torch.Tensor.data_ptr, tensors)), versions_of(tensors)


def _layouts(tensors: Iterable[torch.Tensor | None]) -> tuple[list[Any], ...]:
    """Where tensors lie, and how: another view of a memory is another weight. In bulk, for each step."""
    several = list(tensors)
    there = [each for each in several if each is not None]
    absent = (
        [place for place, each in enumerate(several) if each is None] if len(there) < len(several) else []
    )
    columns = (torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.numel, _dtype_of)
    return absent, *[list(map(column, there)) for column in columns]


def _bound(function: object) -> list[Any]:
    """The values that a function of the user's closes over."""
    if patches.is_of_transformers(function):  # of each layer that ranks divide: the layer, and the ranks
        return []
    return [_content(cell) for each in patches.wrapped_in(function) for cell in each.__closure__ or ()]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing in it yet
        return NOTHING


# ---- when generate() checks


class CallSnapshots(NamedTuple):
    """The last snapshots of a running generate(), so that not every step reads its models again."""

    foreign: bool
    """True if the user's code runs between the steps, and may change a model."""
    snapshots: dict[int, ModelSnapshot]

    def current(self, model: nn.Module) -> ModelSnapshot:
        """The model as it is, checked again only if the user's code may have changed it."""
        known = self.snapshots.get(id(model))
        if known is None:
            known = self.snapshots[id(model)] = ModelSnapshot(model)
        elif self.foreign:
            known = self.snapshots[id(model)] = known.current()
        return known


call_snapshots: ContextVar[CallSnapshots | None] = ContextVar("hf_paged_snapshots", default=None)
"""Those of the running call."""


def runs_foreign_code(arguments: dict[str, Any]) -> bool:
    """True if code other than transformers' own runs between steps of generate() with these arguments."""
    several = [*(arguments.get("logits_processor") or ()), *(arguments.get("stopping_criteria") or ())]
    given = [each for each in (*several, arguments.get("streamer")) if each is not None]
    if any(not type(each).__module__.startswith("transformers.") for each in given):
        return True
    return (
        arguments.get("prefix_allowed_tokens_fn") is not None or arguments.get("custom_generate") is not None
    )
