"""The command `hf-paged info`: the installation, and a model's parts for pages; no weights are loaded."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from typing import Any

from ..model.servable import Unservable, check_architecture, longest
from ..model.slots import slots_of
from ..model.support import why_not
from ..serve.link.loading import Source
from .arguments import source_of
from .environment import facts


def run(given: Namespace) -> int:
    """Print the installation, for a user or an issue, and a model where one is named."""
    print("\n".join(facts().lines()))
    if given.model:
        print("\n".join(["", *model_lines(source_of(given))]))
    return 0


def model_lines(source: Source) -> list[str]:
    """A model's layers, and whether generate() and the engine take it, one fact a line."""
    model = source.outline()
    found = {"model": type(model).__name__, "layers": _layers(model)}
    found["longest sequence"] = str(longest(model) or "not named by its config")
    reason = why_not(model, model.generation_config)
    found["generate()"] = "on pages" if reason is None else f"on transformers' own cache: {reason}"
    found["engine, serve"] = _engine(model)
    width = max(map(len, found))
    return [f"{name:{width}}  {value}" for name, value in found.items()]


def _layers(model: Any) -> str:
    """How many layers of each kind keep their keys and values in pages."""
    try:
        slots = slots_of(model, cross=False)
    except AttributeError as error:
        return f"unknown ({error})"
    kinds = Counter(_kind(slot) for slot in slots)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _kind(slot: Any) -> str:
    if slot.kind is None:
        return f"{type(slot.source).__name__} in transformers' own tensors"
    window = "" if slot.kind.window is None else f" of {slot.kind.window} tokens"
    return f"{slot.kind.name}{window} in pages"


def _engine(model: Any) -> str:
    try:
        check_architecture(model)
    except Unservable as error:
        return f"not served: {error}"
    return "served, if the trial of its forward succeeds when the engine is made"
