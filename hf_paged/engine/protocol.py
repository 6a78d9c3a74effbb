"""The parts of an engine that other objects use, and its methods that run one at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from .fair_lock import FairLock
from .job import Job
from .outputs.queue import Wake

P = ParamSpec("P")
T = TypeVar("T")


class EngineCore(Protocol):
    """An engine, as its handles, its thread and the lock around its methods see it."""

    lock: FairLock
    _broken_off: bool
    """Whether an interrupt has left a change of the books unfinished."""
    _closing: bool
    """Whether a method could not close it at once."""

    def _finish_broken_off(self) -> None:
        """Recover from the one, or finish closing."""

    def _turn(self) -> bool:
        """Do one step, if there is anything to do; the answer is whether there may be more."""

    def _drive_for(self, job: Job, each: bool = False, timeout: float | None = None) -> None:
        """Drive the engine, or wait for its thread, until a job ends or, with `each`, until its next
        increment.
        """

    async def _arrival(self, job: Job, each: bool = False) -> None:
        """Wait for a job without holding up the event loop."""

    def _cancel(self, job: Job) -> None:
        """End a job."""

    def _watch(self, job: Job, wake: Wake, each: bool) -> None:
        """Have `wake` called at the end of a job or of the engine's thread, and at `each` increment."""

    def _unwatch(self, job: Job, wake: Wake) -> None:
        """Call `wake` no more."""


S = TypeVar("S", bound=EngineCore)


def in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that runs under its object's lock, after recovery. A signal handler may call it while its
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
                    if self._broken_off or self._closing:
                        self._finish_broken_off()
                    return method(self, *args, **kwargs)
                finally:
                    if self._broken_off or self._closing:
                        self._finish_broken_off()
        finally:
            turns.waiting.discard(me)

    functools.update_wrapper(turn, method)
    return turn
