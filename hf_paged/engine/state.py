"""The state of an engine, and methods that run one at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from .fair_lock import FairLock
from .weights import PauseMode

P = ParamSpec("P")
T = TypeVar("T")


class Phase(IntEnum):
    """An engine's life. A sleeping engine is paused."""

    OPEN = 0
    PAUSED = 1
    CLOSING = 2
    """It is to be closed as soon as the step that runs is at its end."""
    CLOSED = 3
    """It takes nothing any more, and gives back what it has."""
    FREED = 4


class EngineState:
    """One phase, and in it: idle, in a step, or torn."""

    def __init__(self) -> None:
        self.phase = Phase.OPEN
        self.mode: PauseMode = "recompute"
        """The kind of the last pause."""
        self.sleep_level = 0
        self.stepping = False
        """True while a step or another change of the books runs. Code that comes in between (criteria, signal
        handlers) changes none of them.
        """
        self.torn = False
        """True from the beginning of a change of the books to its end, however it is broken off."""

    @property
    def paused(self) -> bool:
        """True until `resume`: requests wait."""
        return self.phase is Phase.PAUSED

    @property
    def word(self) -> str | None:
        """The state in a word, if the engine takes no steps in it."""
        if self.phase is Phase.PAUSED:
            return "asleep" if self.sleep_level else "paused"
        return None if self.phase is Phase.OPEN else "closed"

    @property
    def closed(self) -> bool:
        """True once nothing is computed any more."""
        return self.phase >= Phase.CLOSED


class InTurn(Protocol):
    """An object whose methods run one at a time."""

    lock: FairLock
    state: EngineState

    def settle(self) -> None:
        """Recover from a change of the books that broke off, and close what is to be closed."""


S = TypeVar("S", bound=InTurn)


def in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that runs under its object's lock, after recovery. A signal handler may call it while its
    thread waits here.
    """

    def turn(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        turns, state = self.lock, self.state
        me = threading.get_ident()
        try:
            turns.waiting.add(me)
            with turns.lock:
                turns.waiting.discard(me)
                try:
                    if state.torn or state.phase >= Phase.CLOSING:
                        self.settle()
                    return method(self, *args, **kwargs)
                finally:
                    if state.torn or state.phase >= Phase.CLOSING:
                        self.settle()
        finally:
            turns.waiting.discard(me)

    functools.update_wrapper(turn, method)
    return turn
