"""What a request has said and nobody has read yet, and who is to be woken when there is more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest

from ...kv import fork_safe_lock
from .output import Increment
from .stream import Stream

Wake = Callable[[], None]
"""Tells somebody that there is something new. Called in the middle of a step, by whatever thread: it neither
waits nor raises.
"""


class OutputQueue:
    """What is new in a request's answers, on its way from the step that makes it to whoever reads it, perhaps
    in another thread.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._reading = fork_safe_lock()
        self._made: deque[Increment] = deque()
        """Increments that were made, and that nobody has taken yet."""
        self.readers: set[Wake] = set()
        """Those who want to know of every increment."""
        self.waiters: set[Wake] = set()
        """Those who want the end only."""

    def __bool__(self) -> bool:
        return bool(self._made) or any(stream.unread for stream in self._streams)

    def put(self) -> None:
        """There is an increment."""
        if self.readers:
            for wake in self.readers.copy():
                wake()

    def end(self) -> None:
        """There will be no more, and the output is there."""
        for wake in [*self.readers.copy(), *self.waiters.copy()]:
            wake()

    def drain(self) -> list[Increment]:
        """What nobody has read yet: the first of every answer, then the second of every one, as they were
        made.
        """
        with self._reading:
            self._make()
            increments = list(self._made)
            self._made.clear()
        return increments

    def next(self) -> Increment | None:
        """The first of what nobody has read yet. Whoever stops after it leaves the others to whoever asks
        next.
        """
        with self._reading:
            if not self._made:
                self._make()
            return self._made.popleft() if self._made else None

    def _make(self) -> None:
        rounds = zip_longest(*(stream.take() for stream in self._streams))
        self._made.extend(increment for each in rounds for increment in each if increment is not None)
