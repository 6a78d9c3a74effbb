"""Shared by the tests: LIMIT, ended, has_ended."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

LIMIT = 300.0
"""Seconds after which what should have come counts as hanging, on a busy machine too. No test waits for it."""


def has_ended(process: psutil.Process) -> bool:
    """True for a zombie, too: on some machines no process waits for those whose parent has died."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ended(processes: Iterable[psutil.Process]) -> bool:
    """True once all of them have ended; False if one goes on for `LIMIT` seconds."""
    left = list(processes)
    last = time.monotonic() + LIMIT
    while left and time.monotonic() < last:
        left = [each for each in left if not has_ended(each)]
        time.sleep(0.02)
    return not left
