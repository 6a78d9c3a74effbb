"""Threads that compile kernels: they end with the process, and none is waited for where none can begin."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from compiling import MODELS, Compiler, Specialisation, make, noting_compiler  # noqa: F401  # a fixture
from fresh_process import FreshProcess

from hf_paged.kv.warmup import TURN, Warming, short_turns

ENDING = """
import time, torch
from hf_paged.kv.warmup import Warming

def main():
    weights = [torch.zeros(1) for _ in range(100_000)]
    later = [(label, [lambda: time.sleep(0.2)] * 600) for label in range(3)]
    Warming(torch.device("cpu"), list, lambda: [lambda: None for _ in weights[:2]], lambda: later).wait()

main()
print(time.time())
"""


def test_a_process_ends_without_compiling_what_is_left(fresh_process: FreshProcess) -> None:
    """A script that leaves its engine open would wait at its end for kernels that nothing launches, or be
    aborted where a thread frees the model while the interpreter ends.
    """
    ended = fresh_process.run(ENDING)
    assert ended.code == 0, ended.stderr
    assert time.time() - float(ended.stdout) < 60  # all of them take 120 seconds on three threads


def test_without_threads_nothing_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing waits: a process that has as many as it may, or one that ends."""

    def begin(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", begin)
    made = Warming(torch.device("cpu"), list, lambda: pytest.fail("in this thread"))
    made.wait()
    made.join()
    assert made.done


def test_turns_of_threads_are_short_while_any_compile() -> None:
    """And as long as before when the last of several, whichever it is, has ended."""
    before = sys.getswitchinterval()
    first, second = short_turns(), short_turns()
    with first:
        assert sys.getswitchinterval() == pytest.approx(TURN)
        second.__enter__()
    assert sys.getswitchinterval() == pytest.approx(TURN)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(before)
    try:
        with short_turns():
            sys.setswitchinterval(0.001)  # as a server does
        assert sys.getswitchinterval() == pytest.approx(0.001)
        with short_turns():
            sys.setswitchinterval(0.002)
            with short_turns():
                assert sys.getswitchinterval() == pytest.approx(TURN)
        assert sys.getswitchinterval() == pytest.approx(0.002)
    finally:
        sys.setswitchinterval(before)


def test_turns_are_as_long_as_before_in_a_forked_process() -> None:
    """None of the threads that compile is there."""
    before = sys.getswitchinterval()
    with short_turns(), ProcessPoolExecutor(1, get_context("fork")) as processes:
        assert processes.submit(sys.getswitchinterval).result(60) == pytest.approx(before)
        assert sys.getswitchinterval() == pytest.approx(TURN)
