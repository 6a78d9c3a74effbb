"""The lock of an engine: the thread that drives keeps no other thread out."""

from __future__ import annotations

import threading
import time

from engine_threads import in_threads, join

from hf_paged.engine.fair_lock import FairLock
from hf_paged.engine.state import EngineState, in_turn


def test_a_lock_that_goes_round() -> None:
    """A thread that takes it again and again does not keep others out, and may take it twice."""

    class Owner:
        def __init__(self) -> None:
            self.lock, self.state, self.taken = FairLock(), EngineState(), 0
            self.state.torn = True

        def settle(self) -> None:
            assert self.lock.mine

        @in_turn
        def take(self) -> int:
            return self.take_again()

        @in_turn
        def take_again(self) -> int:
            self.taken += 1
            time.sleep(0.002)
            return self.taken

        @in_turn
        def look(self) -> None:
            before = self.taken
            time.sleep(0)
            assert self.lock.mine
            assert self.taken == before

    owner, over, waits = Owner(), threading.Event(), []

    def again() -> None:
        while not over.is_set():
            owner.lock.give_way()
            owner.take()

    threads = in_threads([again, again])
    for _ in range(50):
        begin = owner.taken
        owner.look()
        waits.append(owner.taken - begin)
        assert not owner.lock.mine
    over.set()
    join(threads)
    assert sorted(waits)[40] <= 4  # not by chance, many turns later
    assert not owner.lock.waiting
