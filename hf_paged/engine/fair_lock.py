"""The lock of an engine, for a thread that takes it again and again and for others that want it now and
then.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ..kv import fork_safe_lock

P = ParamSpec("P")
T = TypeVar("T")
LONGEST = 0.05
MOMENT = 0.0001
"""Seconds that a driver gives way at most, and how long it sleeps meanwhile."""


class FairLock:
    """A reentrant lock, and the threads that wait for it.

    A thread that drives an engine gives the lock back between two steps; with the lock alone it would be the
    next to have it, too. So threads that want the lock enter themselves in `waiting`, and the driver gives
    way to them.

    The lock is taken by `with turns.lock` and nowhere else: the interpreter's own lock is given back whatever
    an interrupt breaks off, and a context manager in Python is not. Nothing here has to be undone after an
    interrupt: a thread that waits no longer and is still entered costs a driver LONGEST seconds.
    """

    def __init__(self) -> None:
        self.lock = fork_safe_lock()
        self.waiting: set[int] = set()
        """The threads that wait, by their numbers."""

    @property
    def mine(self) -> bool:
        """Whether the calling thread has the lock."""
        lock: Any = self.lock
        return bool(lock._is_owned())  # the name that threading.Condition uses

    def give_way(self) -> None:
        """Between two steps: let the threads have the lock that have waited for it."""
        others = self.waiting - {threading.get_ident()}
        end = time.monotonic() + LONGEST
        while others and not self.mine and time.monotonic() < end:
            time.sleep(MOMENT)
            others &= self.waiting


class TakesTurns(Protocol):
    """An object whose methods run one at a time."""

    lock: FairLock
    _torn: bool
    """Whether an interrupt has broken something off."""
    _closing: bool
    """Whether a method could not close it at once."""

    def _settle(self) -> None:
        """Finish either."""


S = TypeVar("S", bound=TakesTurns)


def in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that runs under its object's lock, on what is settled. A signal handler may call it while its
    thread waits here.
    """

    def turn(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        turns = self.lock
        me = threading.get_ident()
        try:
            turns.waiting.add(me)
            with turns.lock:
                turns.waiting.discard(me)
                try:
                    if self._torn or self._closing:
                        self._settle()
                    return method(self, *args, **kwargs)
                finally:
                    if self._torn or self._closing:
                        self._settle()
        finally:
            turns.waiting.discard(me)

    functools.update_wrapper(turn, method)
    return turn
