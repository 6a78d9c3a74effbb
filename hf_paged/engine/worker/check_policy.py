"""When the engine must check that its model is unchanged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

STEPS = 16
"""The most steps of the engine's own loop between two checks."""
SECONDS = 0.05
"""The longest time between them."""


class WeightsChanged(RuntimeError):
    """The weights have changed between two checks with steps in between: some tokens may mix old and new
    weights.
    """


class CheckPolicy:
    """The policy of checks: when other code than the engine's may have changed the model.

    Foreign code on the thread that drives (a caller between two steps, processors, criteria, hooks and
    modules of the user's in a forward) may change anything: it marks the model dirty, and the next step
    checks. Between two steps of the engine's own loop only other threads could, which must call `pause()`
    first: there a check now and then is enough, and before a request ends or is admitted. Meanwhile the
    memory of the last check is kept alive, because captured steps read it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.unseen = 0
        """Steps begun since the last check; 0 in a step that checks."""
        self.foreign_forward = True
        """True if the model's forward runs code of the user's, as of the last check."""
        self.foreign_on_a_rank = False
        """True if it does on any rank, as of their last check together."""
        self.looks_together = False
        """True if ranks check the model together next: it may be another one on some of them."""
        self.skips_autograd = False
        """True if the model's forward needs nothing of autograd, as of the last check."""
        self.clock = clock
        self._dirty = True
        self._until = 0.0
        self.kept: Sequence[object] = ()

    def mark_dirty(self) -> None:
        """Foreign code has run or is about to run."""
        self._dirty = True

    def mark_forward(self) -> None:
        """The model's forward is about to run, operation by operation."""
        self._dirty |= self.foreign_forward or self.foreign_on_a_rank

    def mark_clean(self) -> None:
        """The model was checked and is clean until it is marked dirty."""
        self.unseen = 0
        self._dirty = False
        self._until = self.clock() + SECONDS

    def skip(self, memory: Callable[[], Sequence[object]], decided: bool = False) -> bool:
        """Begin a step without a check, unless one is due: whether none is. memory: finds what is kept alive
        until `release`. decided: rank 0 has decided that none is due.
        """
        if not decided and (self._dirty or self.unseen >= STEPS or self.clock() >= self._until):
            return False
        self.unseen += 1
        self.kept = self.kept or memory()
        return True

    def release(self) -> None:
        """Mark the model dirty and keep none of its memory: control returns to the caller."""
        self._dirty = True
        self.kept = ()
