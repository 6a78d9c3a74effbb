"""In whose hands the model has been since the engine last looked at it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

STEPS = 16
"""So many steps the engine's own loop takes before it looks again, and no more."""
SECONDS = 0.05
"""As long it takes them without looking."""


class Spoiled(RuntimeError):
    """The weights have changed at some time between steps that nobody looked at: nobody knows which tokens
    are of both.
    """


class Custody:
    """Whether anybody but the engine may have had its model in hands.

    Code that is not the engine's, run by the thread that drives, may do anything to it: whoever lets such
    code run says so, and the next step looks. From one step of the engine's own loop to the next only other
    threads could, who are told to call `pause()`: there it is enough to look now and then, and before
    anything ends or is let in. Meanwhile the memory that the model had when it was looked at is kept: a
    captured step reads it, whatever somebody has put into the model's place.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.unseen = 0
        """How many steps were begun since somebody looked; 0 in a step that looks."""
        self._clock = clock
        self._lent = True
        self._until = 0.0
        self._kept: Sequence[object] = ()

    @property
    def due(self) -> bool:
        """Whether the next step has to look."""
        return self._lent or self.unseen >= STEPS or self._clock() >= self._until

    def lend(self) -> None:
        """Somebody else's code has run, or is about to."""
        self._lent = True

    def seen(self) -> None:
        """The model was looked at, and is the engine's until it is lent."""
        self.unseen, self._lent, self._until = 0, False, self._clock() + SECONDS

    def trust(self, memory: Callable[[], Sequence[object]]) -> None:
        """A step begins that does not look. `memory` finds what is to be kept until the model is let go."""
        self.unseen += 1
        self._kept = self._kept or memory()

    def let_go(self) -> None:
        """Whoever drove is about to do something else: nothing of the model is kept any more."""
        self._lent, self._kept = True, ()
