"""Layers whose outputs are read together: attention that makes query, key and value before it reads any."""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import nn

ONLY_VIEWS = frozenset({"view", "transpose", "reshape", "unflatten"})
"""Methods that make a view of a contiguous output, which later writes to it reach."""


class _LayerUse(NamedTuple):
    """Where a layer is used: by which module, under which name, and its place in the model's order."""

    parent: weakref.ref[nn.Module]
    name: str
    number: int


_places: weakref.WeakKeyDictionary[nn.Module, _LayerUse] = weakref.WeakKeyDictionary()


def note_places(model: nn.Module) -> None:
    """Note where each layer of a model is used."""
    children = (
        (parent, name, child) for parent in model.modules() for name, child in parent.named_children()
    )
    for number, (parent, name, child) in enumerate(children):
        _places[child] = _LayerUse(weakref.ref(parent), name, number)


def in_order(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Layers in the order of their model, where that is known: those with one input side by side."""
    return sorted(layers, key=lambda layer: _places[layer].number if layer in _places else 0)


def projection_name(layer: nn.Module) -> str | None:
    """The name of a layer in its parent."""
    place = _places.get(layer)
    return None if place is None else place.name


def joint_layers(numbers: Mapping[nn.Module, int]) -> dict[int, int]:
    """For each numbered layer whose output is read together with those of later ones the number of the last
    of them, where all have one parent and stand side by side.
    """
    found: dict[int, int] = {}
    by_parent: dict[nn.Module, dict[str, int]] = {}
    for layer, number in numbers.items():
        place = _places.get(layer)
        parent = None if place is None else place.parent()
        if place is not None and parent is not None and "forward" not in parent.__dict__:
            by_parent.setdefault(parent, {})[place.name] = number
    for parent, names in by_parent.items():
        for run in runs_of(type(parent).forward):
            ours = [names[name] for name in run if name in names]
            if len(ours) > 1 and ours == list(range(ours[0], ours[0] + len(ours))):
                found.update(dict.fromkeys(ours[:-1], ours[-1]))
    return found


@cache
def runs_of(forward: Callable[..., Any]) -> tuple[tuple[str, ...], ...]:
    """The names of layers that a forward calls on one input in statements that follow each other, and whose
    outputs these statements do no more than view.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return ()
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return ()
    runs: list[list[tuple[str, str]]] = [[]]
    for statement in definition.body:
        call = _call_of(statement)
        if call is None or (runs[-1] and runs[-1][0][1] != call[1]):
            runs.append([])
        if call is not None:
            runs[-1].append(call)
    return tuple(tuple(name for name, _ in run) for run in runs if len(run) > 1)


def _call_of(statement: ast.stmt) -> tuple[str, str] | None:
    """The layer and the input of `x = self.layer(input).view(...).transpose(...)`."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return None
    value = statement.value
    while (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in ONLY_VIEWS
        and isinstance(value.func.value, ast.Call)
    ):
        value = value.func.value
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    layer = value.func
    plain = isinstance(layer.value, ast.Name) and layer.value.id == "self"
    if not plain or len(value.args) != 1 or value.keywords or not isinstance(value.args[0], ast.Name):
        return None
    if value.args[0].id == statement.targets[0].id:
        return None
    return layer.attr, value.args[0].id
