"""Callbacks that do not keep the object that they belong to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """A method of an object for a part of that object. If each kept the other, only a collection would free
    them, and the model with them.
    """
    reference = weakref.WeakMethod(method)
    name = getattr(method, "__qualname__", "a method")

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        found = reference()
        if found is None:
            raise ReferenceError(f"{name} is called, and its object is gone")
        return found(*args, **kwargs)

    return call
