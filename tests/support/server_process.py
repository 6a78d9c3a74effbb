"""A server of the demo model that is a process, and what it logs."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from typing import Any

from commands import Command

LONG = {
    "prompt": "The fox",
    "max_tokens": 900,
    "ignore_eos": True,
    "temperature": 1.0,
    "n": 4,
    "stream": True,
}
"""A stream that goes on."""


class Process:
    """`hf-paged serve demo` on a free port, and what it logs. alone: in an interpreter of its own."""

    def __init__(self, *flags: str, alone: bool = False) -> None:
        arguments = ["serve", "demo", "--port", "0", "--log-format", "json", *flags]
        self.popen: subprocess.Popen[str] | Command
        if alone:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "hf_paged", *arguments],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            )
        else:
            self.popen = Command(*arguments)
        self.lines: list[dict[str, Any]] = []
        self.others: list[str] = []
        """Lines that are written beside the log, as a traceback."""
        self._news: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self.wait_for("listening")["url"]
        self.wait_for("ready")

    def _read(self) -> None:
        for line in self.popen.stderr:
            if line.startswith("{"):
                self._news.put(json.loads(line))
            else:
                self.others.append(line)
        self._news.put(None)

    def wait_for(self, message: str | None) -> dict[str, Any]:
        """The next log line with a message; None is the end."""
        while True:
            line = self._news.get(timeout=120)
            if line is None:
                assert message is None, f"the process has ended: {self.lines} {''.join(self.others)}"
                return {}
            self.lines.append(line)
            if line["message"] == message:
                return line
