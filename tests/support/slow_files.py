"""A regular file that another process may not open yet, as on a disk that hangs."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

needs_leases = pytest.mark.skipif(sys.platform != "linux", reason="leases of files are Linux's")
GUARD = 30
"""Seconds after which something hangs; Linux takes a lease away after 45."""


@contextmanager
def slow(path: str | os.PathLike[str]) -> Iterator[Callable[[], None]]:
    """While the block runs, whoever opens the file waits. The value waits until somebody does."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel's wish that the lease ends
    holder = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)

        def wait() -> None:
            end = time.monotonic() + GUARD
            while fcntl.fcntl(holder, fcntl.F_GETLEASE) == fcntl.F_WRLCK:
                assert time.monotonic() < end
                time.sleep(0.01)

        yield wait
    finally:
        os.close(holder)
        signal.signal(signal.SIGIO, before)
