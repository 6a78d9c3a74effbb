"""What is set on a model's modules: adapters that are switched, scaled or merged, parts that are replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import nn

from ..model.identity import INTERNAL, OURS
from ..model.state import Same, fact_of, modules_of
from ..model.switch import original_implementation

CONTAINERS = (list, tuple, set, frozenset, dict)


class Settings:
    """What the modules of a model were set to when this was made, to see whether somebody has changed it
    since.

    The very objects are compared, so a look costs little; only where they are others they are asked what they
    say. Left out are modules with buffers, which may note in a forward how long it was (rotary positions),
    and whose code runs: hooks, and a `forward` that was set.
    """

    def __init__(self, model: nn.Module, restless: Collection[tuple[type, str]] = ()) -> None:
        """restless: the settings of kinds of modules that a forward sets itself."""
        self.model, self.restless = model, frozenset(restless)
        modules = [
            model,
            *(module for module in modules_of(model) if module is not model and not module._buffers),
        ]
        self._owns = [(type(module), module.__dict__) for module in modules]
        self._parts = [own["_modules"] for _, own in self._owns if own["_modules"]]
        self._note()

    def after_forwards(self) -> Settings:
        """The settings of now, where nothing but forwards has happened: what these have set is not looked
        at.
        """
        before = dict(zip(map(id, map(itemgetter(1), self._owns)), map(dict, self._noted[0]), strict=True))
        after = Settings(self.model, self.restless)
        found = {
            (kind, name)
            for (kind, own), facts in zip(after._owns, after._noted[0], strict=True)
            for name, fact in facts
            if (before.get(id(own)) or {}).get(name, after) != fact
        }
        return Settings(self.model, self.restless | found) if found else after

    def changed(self) -> bool:
        """Whether anything says something else than it did."""
        try:
            if self._same():
                return False
            if self._facts() != self._noted:
                return True
        except (KeyError, RuntimeError):  # somebody changes it this very moment, or has taken it away
            return True
        self._note()
        return False

    def _note(self) -> None:
        # Modules of a kind have the same attributes, so few of these are there.
        alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for kind, own in self._owns:
            alike.setdefault(self._names(kind, own), []).append(own)
        settings = [own[name] for names, owns in alike.items() for own in owns for name in names]
        inside = [value for value in settings if isinstance(value, CONTAINERS)]
        # Two at least, so that a getter answers with a tuple.
        self._kinds = [
            (itemgetter(*names) if len(names) > 1 else itemgetter("training", "training"), owns)
            for names, owns in alike.items()
        ]
        self._dicts = [value for value in inside if isinstance(value, dict)] + self._parts
        self._others = [value for value in inside if not isinstance(value, dict)]
        self._sizes, self._kept, self._noted = self._counts(), list(self._objects()), self._facts()

    def _names(self, kind: type, own: dict[str, Any]) -> tuple[str, ...]:
        """What is looked at of a module's own dict."""
        # All names at once: a generate() in another thread may set a forward this very moment.
        return tuple(
            [
                name
                for name in list(own)
                if name not in INTERNAL and name != "forward" and (kind, name) not in self.restless
            ]
        )

    def _same(self) -> bool:
        return self._sizes == self._counts() and all(map(is_, self._objects(), self._kept))

    def _counts(self) -> list[int]:
        return list(map(len, chain(map(itemgetter(1), self._owns), self._dicts, self._others)))

    def _objects(self) -> Iterator[Any]:
        """Every setting, every part of a module, and what stands in lists and dicts of settings."""
        settings = [chain.from_iterable(map(get, owns)) for get, owns in self._kinds]
        return chain(
            *settings, chain.from_iterable(map(dict.values, self._dicts)), chain.from_iterable(self._others)
        )

    def _facts(self) -> tuple[list[list[tuple[str, Any]]], list[list[int]]]:
        """What the settings of each module say, and which its parts are."""
        said = [[(name, _fact_of(own[name])) for name in self._names(kind, own)] for kind, own in self._owns]
        return said, [list(map(id, part.values())) for part in self._parts]


def _fact_of(value: Any) -> Any:
    """What a setting says; of a config not which attention it has while a step runs, perhaps in another
    thread.
    """
    own = getattr(value, "__dict__", None)
    if not own or OURS.isdisjoint(own):
        return fact_of(value)
    return (
        Same(value),
        original_implementation(value),
        fact_of({name: part for name, part in own.copy().items() if name not in OURS}),
    )
