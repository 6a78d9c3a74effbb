"""Whether a model is still what was read of it, asked in every step: what was there is compared with what is,
and nothing is read anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from . import state as states
from .state import INTERNAL, PLAIN, ModelState, Same, fact_of, in_own_code, modules_of
from .switch import original_implementation

TENSORS = ("_parameters", "_buffers")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
PARTS = ("_modules", *TENSORS, *HOOKS)
"""The dicts that every module has and that are looked into."""
CONTAINERS = (list, tuple, set, frozenset, dict)
"""Whose contents are looked at one by one, whatever else they are."""
NOWHERE = object()
_dict_of = attrgetter("__dict__")
_parts_of = itemgetter(*PARTS)


class Lookout:
    """A model's state, and the very objects it was read from.

    While these stand where they stood, and say what they said, a state that is read again would be equal.
    Where they do not, it may be equal all the same: then it is read. Objects are told apart by what they are,
    never asked whether they are equal, for a tensor would answer with a tensor.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self.state = ModelState(model, forward)
        self._around = _around(forward)
        self._model = model
        self._modules = list(modules_of(model))
        owns = list(map(_dict_of, self._modules))
        self._types, self._sizes = list(map(type, self._modules)), list(map(len, owns))
        # All modules of a kind have the same attributes, so few of these are there.
        kinds: dict[tuple[str, ...], list[nn.Module]] = {}
        for module in self._modules:
            kinds.setdefault(self._names(module), []).append(module)
        self._kinds = [(itemgetter(*names), alike) for names, alike in kinds.items()]
        self._values = list(self._of_modules())
        self._parts = list(map(_parts_of, owns))
        parts = list(chain.from_iterable(self._parts))
        self._empty, self._filled = [part for part in parts if not part], [part for part in parts if part]
        self._lengths = list(map(len, self._filled))
        self._views = [own[part].values() for own in owns for part in TENSORS if own[part]]
        self._pointers = _pointers(self._views)
        self._holders = [own[part].values() for own in owns for part in ("_modules", *HOOKS) if own[part]]
        self._held = list(chain.from_iterable(self._holders))
        self._configs = list({id(own["config"]): own["config"] for own in owns if "config" in own}.values())
        self._settings = _settings(self._configs)
        # What has contents of its own that are part of the state; of anything else it is enough that it is
        # there.
        facts = {id(value): (value, fact_of(value)) for value in self._values if type(value) not in PLAIN}
        told = [(value, fact) for value, fact in facts.values() if type(fact) is not Same]
        objects = [
            value
            for value, _ in told
            if hasattr(value, "__dict__") and not isinstance(value, (*CONTAINERS, torch.Tensor))
        ]
        inside = list(_containers([value for value, _ in told]))
        kept = {id(each) for each in (*objects, *inside)}
        self._facts = [(value, fact) for value, fact in told if id(value) not in kept]
        self._lists = [each for each in inside if not isinstance(each, dict)]
        self._listed = list(chain.from_iterable(self._lists))
        self._insides = [*(each for each in inside if isinstance(each, dict)), *map(vars, objects)]
        self._keys = list(chain.from_iterable(self._insides))
        self._views_within = [each.values() for each in self._insides]
        self._within = list(chain.from_iterable(self._views_within))
        self._sizes_within = list(map(len, chain(self._insides, self._lists)))
        self._facts += [
            (each, fact_of(each)) for each in (*self._within, *self._listed) if isinstance(each, torch.Tensor)
        ]
        self._code = _Code(dict.fromkeys(self._types))

    def _names(self, module: nn.Module) -> tuple[str, ...]:
        """Whose values in a module's own dict are looked at: two at least, so that a getter answers with a
        tuple.
        """
        own = [
            name
            for name in module.__dict__
            if name not in INTERNAL and (module is not self._model or name != "forward")
        ]
        return tuple(own) if len(own) > 1 else ("training", "training")

    def _of_modules(self) -> Iterator[Any]:
        return chain.from_iterable(
            [value for get, alike in self._kinds for value in map(get, map(_dict_of, alike))]
        )

    def unchanged(self, forward: Callable[..., Any]) -> bool:
        """Whether the model is surely as its state says."""
        try:
            return self._unchanged(forward)
        except (
            KeyError,
            AttributeError,
            RuntimeError,
        ):  # something that was there is not, or changes this very moment
            return False

    def _unchanged(self, forward: Callable[..., Any]) -> bool:
        owns = list(map(_dict_of, self._modules))
        return (
            self._around == _around(forward)
            and _same(self._types, map(type, self._modules))
            and list(map(len, owns)) == self._sizes
            and _same(self._values, self._of_modules())
            and list(map(_parts_of, owns)) == self._parts
            and not any(self._empty)
            and list(map(len, self._filled)) == self._lengths
            and _same(self._held, chain.from_iterable(self._holders))
            and _pointers(self._views) == self._pointers
            and list(map(len, chain(self._insides, self._lists))) == self._sizes_within
            and _same(self._within, chain.from_iterable(self._views_within))
            and _same(self._listed, chain.from_iterable(self._lists))
            and _same(self._keys, chain.from_iterable(self._insides))
            and all(fact_of(value) == fact for value, fact in self._facts)
            and _settings(self._configs) == self._settings
            and self._code.unchanged()
        )


class _Code:
    """The code of classes of modules, with what it names in its file: what `in_own_code` finds, by the places
    where it was found.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self._bases = list(dict.fromkeys(base for kind in kinds for base in in_own_code(kind)))
        self._sizes = [len(vars(base)) for base in self._bases]
        self._values = list(_contents(map(vars, self._bases)))
        self._functions = [value for value in self._values if isinstance(value, FunctionType)]
        self._codes = [function.__code__ for function in self._functions]
        names: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        for function in self._functions:
            place = function.__globals__
            names.setdefault(id(place), (place, {}))[1].update(dict.fromkeys(function.__code__.co_names))
        self._named = [(place, list(of_place)) for place, of_place in names.values()]
        self._globals = list(self._of_places())
        self._cells = [cell for function in self._functions for cell in function.__closure__ or ()]
        self._enclosed = list(map(_content, self._cells))

    def _of_places(self) -> Iterator[Any]:
        return chain.from_iterable([map(place.get, names, repeat(NOWHERE)) for place, names in self._named])

    def unchanged(self) -> bool:
        return (
            [len(vars(base)) for base in self._bases] == self._sizes
            and _same(self._values, _contents(map(vars, self._bases)))
            and _same(self._codes, [function.__code__ for function in self._functions])
            and _same(self._globals, self._of_places())
            and _same(self._enclosed, map(_content, self._cells))
        )


def _same(before: Iterable[Any], now: Iterable[Any]) -> bool:
    """Whether these are as many objects as those, and the very same."""
    return all(map(is_, before, now))


def _containers(values: Iterable[Any], depth: int = 0) -> Iterator[Any]:
    """The lists and dicts among values, and those in them, as deep as `fact_of` looks."""
    for value in values:
        if depth < 2 and isinstance(value, CONTAINERS):
            yield value
            yield from _containers(value.values() if isinstance(value, dict) else value, depth + 1)


def _contents(dicts: Iterable[Any]) -> Iterator[Any]:
    return chain.from_iterable([each.values() for each in dicts])


def _pointers(views: Iterable[Iterable[torch.Tensor | None]]) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in chain.from_iterable(views)]


def _around(forward: Callable[..., Any]) -> tuple[Any, ...]:
    """What is no module's: how torch multiplies, everybody's hooks, and the forward that is called."""
    everywhere = nn.modules.module
    hooks = bool(everywhere._global_forward_hooks), bool(everywhere._global_forward_pre_hooks)
    return (
        *hooks,
        torch.are_deterministic_algorithms_enabled(),
        getattr(forward, "__func__", forward),
        states._products(),
    )


def _settings(configs: Iterable[Any]) -> list[Any]:
    return [
        (original_implementation(each), [fact_of(value) for value in getattr(each, "__dict__", {}).values()])
        for each in configs
    ]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing in it yet
        return NOWHERE
