"""A lock for one that takes it again and again, and many that want it now and then."""

from __future__ import annotations

import threading


class Turns:
    """A lock that its holder may take again, and that goes to whoever waits for it, not back to who has just let go.

    A thread that drives an engine lets go for a moment between two steps; with a plain lock it would be the next to have it, too.
    Whoever wants the lock stands at a door first, and the driver finds the door taken.
    """

    def __init__(self) -> None:
        self._door, self._lock = threading.Lock(), threading.RLock()
        self._holder: int | None = None
        self._depth = 0

    @property
    def mine(self) -> bool:
        """Whether the thread that asks has the lock."""
        return self._holder == threading.get_ident()

    def __enter__(self) -> Turns:
        if self.mine:
            self._lock.acquire()
        else:
            with self._door:
                self._lock.acquire()
            self._holder = threading.get_ident()
        self._depth += 1
        return self

    def __exit__(self, *trouble: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
        self._lock.release()
