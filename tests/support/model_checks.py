"""Shared by the tests: graph_key, is_steady, checker, prefix_key, blind_keys, make_unreadable,
change_precision, count_checks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest

from hf_paged.engine.weights import Weights
from hf_paged.model.identity import Identity, identity_of
from hf_paged.model.lookout import Lookout
from hf_paged.model.state import ModelState
from hf_paged.model.weights_digest import Unreadable


def graph_key(model: Any) -> Hashable:
    """What a captured step takes for granted about the model."""
    return ModelState(model, model.forward)


def is_steady(model: Any) -> bool:
    """Whether a captured step may stand for the model's forward."""
    return ModelState(model, model.forward).steady


def checker(model: Any) -> Callable[[], bool]:
    """A quick check whether the model is still as it is now."""
    kept = Lookout(model, model.forward)
    return lambda: kept.unchanged(model.forward)


def prefix_key(model: Any) -> int:
    """The number of the state that cached keys and values come from."""
    own = identity_of(model)
    return own.number(own.begin(model, model.forward))


def blind_keys(patch: pytest.MonkeyPatch) -> None:
    """Every state of a model has one number, and no check sees a change."""
    patch.setattr(Identity, "number", lambda self, glance: 1)
    patch.setattr(Identity, "still", lambda self, *args: True)


def make_unreadable(patch: pytest.MonkeyPatch) -> None:
    """The content of weights cannot be read."""

    def unreadable(*_: Any) -> Any:
        raise Unreadable("a tensor without memory")

    patch.setattr(Identity, "begin", unreadable)


def change_precision(patch: pytest.MonkeyPatch) -> None:
    """Torch multiplies float32 matrices in another precision."""
    patch.setattr("hf_paged.model.state._products", lambda: "another")


def count_checks(patch: pytest.MonkeyPatch, check: Callable[[str], object]) -> None:
    """Call `check` with "weights" before an engine's check of weights and settings, with "graphs" before that
    of captured steps, with "all" before one that reads weights.
    """

    def watch(owner: type, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def watched(*args: Any) -> Any:
            check(name)
            return inner(*args)

        patch.setattr(owner, method, watched)

    watch(Weights, "touched", "weights")
    watch(Lookout, "unchanged", "graphs")
    watch(Weights, "_look", "all")
