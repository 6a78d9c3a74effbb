"""The lock of an engine, for a thread that takes it again and again and for others that want it now and
then.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ..kv import fork_safe_lock

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
        """True if the calling thread has the lock."""
        lock: Any = self.lock
        return bool(lock._is_owned())  # the name that threading.Condition uses

    def give_way(self) -> None:
        """Between two steps: let the threads have the lock that have waited for it."""
        others = self.waiting - {threading.get_ident()}
        end = time.monotonic() + LONGEST
        while others and not self.mine and time.monotonic() < end:
            time.sleep(MOMENT)
            others &= self.waiting
