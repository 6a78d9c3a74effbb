"""What a request has said and nobody has read yet, and who is to be woken when there is more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .output import Increment

Wake = Callable[[], None]
"""Tells somebody that there is something new. Called in the middle of a step, by whatever thread: it neither waits nor raises."""


class News:
    """Increments on their way from the step that makes them to whoever reads them, perhaps in another thread."""

    def __init__(self) -> None:
        self._increments: deque[Increment] = deque()
        self._readers: list[Wake] = []
        self._waiters: list[Wake] = []
        """Those who want to know of every increment, and those who want the end only."""

    def __bool__(self) -> bool:
        return bool(self._increments)

    def tell(self, increment: Increment) -> None:
        """Add an increment."""
        self._increments.append(increment)
        for wake in self._readers.copy():
            wake()

    def end(self) -> None:
        """There will be no more, and the output is there."""
        for wake in self._readers + self._waiters:
            wake()

    def take(self) -> list[Increment]:
        """What nobody has read yet."""
        return [self._increments.popleft() for _ in range(len(self._increments))]

    @contextmanager
    def waking(self, wake: Wake, each: bool) -> Iterator[None]:
        """Have somebody woken at the end, or at `each` increment."""
        listeners = self._readers if each else self._waiters
        listeners.append(wake)
        try:
            yield
        finally:
            listeners.remove(wake)
