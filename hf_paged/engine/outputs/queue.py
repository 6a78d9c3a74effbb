"""The unread increments of a request, and the readers to be woken by the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest

from ...kv import fork_safe_lock
from .output import Increment, NewTokens
from .stream import Stream

Wake = Callable[[], None]
"""Notifies a reader of something new. It is called within a step, by any thread: it neither waits nor raises.
"""


class OutputQueue:
    """Increments of a request's answers, on their way from the step that makes them to their reader, perhaps
    in another thread.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._reading = fork_safe_lock()
        self._made: deque[Increment] = deque()
        """Increments that were made and not read yet."""
        self.readers: set[Wake] = set()
        """Readers that are woken by every increment."""
        self.waiters: set[Wake] = set()
        """Readers that are woken by the end only."""
        self.listeners: set[OutputQueue] = set()
        """The queues with readers that a thread drives: this one is among them until its end."""

    def __bool__(self) -> bool:
        return bool(self._made) or any(stream.unread for stream in self._streams)

    def put(self) -> None:
        """There is an increment."""
        if self.readers:
            for wake in self.readers.copy():
                wake()

    def end(self) -> None:
        """There will be no more, and the output is there."""
        self.wake()
        self.listeners.discard(self)

    def wake(self) -> None:
        """Wake all readers."""
        for wake in [*self.readers.copy(), *self.waiters.copy()]:
            wake()

    def drain(self) -> list[Increment]:
        """All unread increments: the first of every answer, then the second of every one,
        as they were made.
        """
        with self._reading:
            self._make()
            increments = list(self._made)
            self._made.clear()
        return increments

    def drain_tokens(self) -> list[NewTokens]:
        """The unread tokens of all answers, without their text. A reader uses this or the others."""
        found = []
        with self._reading:
            for stream in self._streams:
                new = stream.take_tokens()
                while new is not None:
                    found.append(new)
                    new = None if stream.finish_reason is None else stream.take_tokens()
        return found

    def next(self) -> Increment | None:
        """The first unread increment. The others stay for the next call."""
        with self._reading:
            if not self._made:
                self._make()
            return self._made.popleft() if self._made else None

    def _make(self) -> None:
        rounds = zip_longest(*(stream.take() for stream in self._streams))
        self._made.extend(increment for each in rounds for increment in each if increment is not None)
