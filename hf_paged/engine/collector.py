"""Python's garbage collector and the engine's steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def without_collections(act: Callable[[], T]) -> T:
    """The answer of `act`; the garbage collector runs after it, not within.

    A step makes some objects for each of its rows and drops them again. A collection within a step would move
    them to an older generation, and after enough of those Python walks all of its objects: a quarter of a
    second where torch is loaded. After the step they are gone. A collector that was disabled stays disabled.
    """
    on = gc.isenabled()
    try:
        gc.disable()
        return act()
    finally:
        if on:
            gc.enable()
