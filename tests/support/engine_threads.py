"""Shared by the tests: GREEDY, GUARD, Gate, in_threads, join, meanwhile, model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from engine_faults import Does
from families import BY_NAME, build
from processes import LIMIT

GUARD = LIMIT


"""Seconds after which something hangs. Nothing here takes as long."""


GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def model() -> Any:
    return build(BY_NAME["llama"])


class Gate:
    """A criterion that holds up the step in which its request has its n-th token, until it is opened."""

    def __init__(self, token: int = 1) -> None:
        self.token = token
        self.reached, self.open = threading.Event(), threading.Event()
        self.opened_in_time: bool | None = None

    @property
    def criterion(self) -> Does:
        return Does(self._hold)

    def _hold(self) -> None:
        self.token -= 1
        if self.token == 0:
            self.reached.set()
            self.opened_in_time = self.open.wait(GUARD)

    def wait(self) -> None:
        assert self.reached.wait(GUARD)


def in_threads(acts: list[Callable[[], None]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=act, daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    return threads


def meanwhile(act: Callable[[], None], begun: Callable[[], bool]) -> list[threading.Thread]:
    """Do something in another thread that will have to wait, and wait until it does."""
    threads, end = in_threads([act]), time.monotonic() + GUARD
    while not begun():
        assert time.monotonic() < end
        time.sleep(0)
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(GUARD)
        assert not thread.is_alive()
