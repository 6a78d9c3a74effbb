"""Python's garbage collector and the engine's steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def without_collections(act: Callable[[], T]) -> T:
    """The answer of `act`; the garbage collector runs after it, not in between.

    A step makes some objects for each of its rows and drops them again. A collection in the middle of it
    takes them for objects that live on, and after enough of them all of Python's objects are looked through:
    a quarter of a second where torch is loaded. Behind the step they are gone. Whoever has switched the
    collector off finds it off.
    """
    on = gc.isenabled()
    try:
        gc.disable()
        return act()
    finally:
        if on:
            gc.enable()
