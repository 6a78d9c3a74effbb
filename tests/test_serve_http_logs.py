"""Log lines are written in a thread: a reader that is slow holds up nobody."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading

import pytest
from processes import LIMIT

from hf_paged.serve.http import logs


class Stuck(io.StringIO):
    """A pipe whose reader reads nothing for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Event()

    def write(self, text: str) -> int:
        assert self.reads.wait(LIMIT)
        return super().write(text)


def test_a_stuck_reader_holds_up_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that do not fit into the queue are dropped, the rest comes in order when it is read."""
    pipe = Stuck()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(logs, "MOST_RECORDS", 5)
    kept = {name: list(logging.getLogger(name).handlers) for name in logs.LOGGERS}
    ends = []
    monkeypatch.setattr(logs.atexit, "register", ends.append)
    try:
        logs.set_up("info", "json")
        log = logging.getLogger("hf_paged.serve")
        for i in range(50):
            log.info("request", extra={"number": i})
        pipe.reads.set()
        ends[0]()
    finally:
        for name, handlers in kept.items():
            logging.getLogger(name).handlers = handlers
            logging.getLogger(name).setLevel(logging.NOTSET)
            logging.getLogger(name).propagate = True
    numbers = [json.loads(line)["number"] for line in pipe.getvalue().splitlines()]
    assert numbers == list(range(len(numbers)))
    assert 5 <= len(numbers) <= 7
