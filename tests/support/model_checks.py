"""Shared by the tests: graph_key, is_steady, checker, prefix_key, blind_keys, make_unreadable,
change_precision, count_checks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest

from hf_paged.engine.worker.model_check import ModelCheck
from hf_paged.model.identity import Identity, identity_of
from hf_paged.model.snapshot import ModelSnapshot
from hf_paged.model.weights_digest import Unreadable


def graph_key(model: Any) -> Hashable:
    """The properties of the model that a captured step takes for granted."""
    return ModelSnapshot(model).graph_key


def is_steady(model: Any) -> bool:
    """True if a captured step may stand for the model's forward."""
    return ModelSnapshot(model).steady


def checker(model: Any) -> Callable[[], bool]:
    """A quick check whether the model is still as it is now."""
    return ModelSnapshot(model, watch=True).unchanged


def prefix_key(model: Any) -> int:
    """The number of the state that cached keys and values come from."""
    return identity_of(model).prefix_key(ModelSnapshot(model))


def blind_keys(patch: pytest.MonkeyPatch) -> None:
    """Every state of a model has one number, and no check sees a change."""
    patch.setattr(Identity, "prefix_key", lambda self, snapshot: 1)
    patch.setattr(Identity, "still", lambda self, *args: True)


def make_unreadable(patch: pytest.MonkeyPatch) -> None:
    """The content of weights cannot be read."""

    def unreadable(*_: Any) -> Any:
        raise Unreadable("a tensor without memory")

    patch.setattr(Identity, "prefix_key", unreadable)


def change_precision(patch: pytest.MonkeyPatch) -> None:
    """Torch multiplies float32 matrices in another precision."""
    patch.setattr("hf_paged.model.snapshot.torch_settings", lambda: "another")


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

    watch(ModelCheck, "touched", "weights")
    watch(ModelSnapshot, "unchanged", "graphs")
    watch(ModelCheck, "_check", "all")
