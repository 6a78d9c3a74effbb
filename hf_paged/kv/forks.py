"""Locks that are free in a forked process: a fork copies a lock that another thread holds, but not that
thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_repairs: list[Callable[[], None]] = []


def fork_safe_lock() -> threading.RLock:
    """A lock for this package.

    It is reentrant, so a signal handler may take it on top of the code that it has interrupted. In a forked
    process it is free unless the forking thread itself holds it.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def in_forked_process(repair: Callable[[], None]) -> None:
    """Call `repair` in every process that is forked from this one, as soon as its locks are free."""
    _repairs.append(repair)


def _after_fork() -> None:
    for lock in list(_locks):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            lock._at_fork_reinit()
    for repair in _repairs:
        repair()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
