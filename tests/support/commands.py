"""The command line in a fork of this process: it has the imports, which take seconds in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.context import ForkProcess
from typing import IO

import torch


class Command(ForkProcess):
    """`python -m hf_paged ARGUMENTS`, with what is used of subprocess.Popen. Where there is no fork it is refused.

    stderr: what it writes there, and the processes that it starts; it ends when all of them have ended.
    """

    def __init__(self, *arguments: str) -> None:
        super().__init__()
        self._arguments = arguments
        read, self._written = os.pipe()
        self.stderr = os.fdopen(read)
        self.start()
        os.close(self._written)

    def run(self) -> None:
        """In the fork."""
        self.stderr.close()
        os.dup2(self._written, 2)
        os.close(self._written)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        torch.set_num_threads(1)  # makes torch's thread pool anew: two threads would race
        sys.argv = ["hf_paged", *self._arguments]
        runpy.run_module("hf_paged", run_name="__main__")

    def wait(self, timeout: float) -> int:
        """The exit code, or the signal that ended it as a negative number."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("hf_paged", timeout)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid or 0, number)


class ForkedPopen(ForkProcess):
    """Stands for subprocess.Popen of `python -m MODULE ARGUMENTS`: for tests of many processes, which would all import
    the same.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        pass_fds: Collection[int] = (),
        start_new_session: bool = False,
    ) -> None:
        super().__init__()
        assert words[:2] == [sys.executable, "-m"]
        self._module, *self._arguments = words[2:]
        self._environment = dict(env)
        self._kept = pass_fds
        self._session = start_new_session
        self._read, written = os.pipe()
        self.stdin: IO[bytes] | None = os.fdopen(written, "wb") if stdin == subprocess.PIPE else None
        self.start()
        os.close(self._read)
        if self.stdin is None:
            os.close(written)

    def run(self) -> None:
        """In the fork, which keeps the files that a new process would have."""
        gc.freeze()  # nothing that is collected closes a file of ours
        os.dup2(self._read, 0)
        first = 3
        for kept in [*sorted(self._kept), os.sysconf("SC_OPEN_MAX")]:
            os.closerange(first, kept)
            first = kept + 1
        self._before = sys.stdout, sys.stderr  # they may close 1 and 2
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", buffering=1)
        if self._session:
            os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(self._environment)
        torch.set_num_threads(1)
        sys.argv = [self._module, *self._arguments]
        runpy.run_module(self._module, run_name="__main__")

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.exitcode is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self._module, timeout or 0.0)
            time.sleep(0.01)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid or 0, number)
