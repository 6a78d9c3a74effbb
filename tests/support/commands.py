"""The command line in a fork of this process: it has the imports, which take seconds in a process of its own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from multiprocessing.context import ForkProcess

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
