"""Wake-ups and submissions, some in each turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_paged.serve.http.throttle import EVENTS, Turns, aside


def test_turns_are_taken_in_order_and_between_others() -> None:
    async def run() -> tuple[list[int], int]:
        turns = Turns(4)
        order: list[int] = []
        rounds = 0

        async def take(i: int) -> None:
            await turns.take()
            order.append(i)

        tasks = [asyncio.create_task(take(i)) for i in range(40)]
        tasks[20].cancel()
        while len(order) < 39:
            await asyncio.sleep(0)
            rounds += 1
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns.take()
        return order, rounds

    order, rounds = asyncio.run(run())
    assert order == [i for i in range(40) if i != 20]
    assert 9 <= rounds <= 30


def test_others_run_in_a_pause_between_turns() -> None:
    """Requests that come in a turn that lasts are answered before the next one."""

    async def run() -> list[str]:
        loop = asyncio.get_running_loop()
        turns = Turns(1, pause=0.001)
        order: list[str] = []

        async def long(i: int) -> None:
            await turns.take()
            order.append(f"long {i}")
            asyncio.get_running_loop().call_soon(arrive, i)
            time.sleep(0.005)

        def arrive(i: int) -> None:
            """As a request does: it is read in one turn and answered in the next one."""
            loop.call_soon(order.append, f"answered {i}")

        await asyncio.gather(*(long(i) for i in range(3)))
        await turns.take()
        return order

    order = asyncio.run(run())
    assert order == ["long 0", "answered 0", "long 1", "answered 1", "long 2", "answered 2"]


def test_many_events_take_several_turns() -> None:
    """Other tasks that are ready run in between: a step of many streams does not hold up /health."""

    async def run() -> list[int]:
        wakes = Turns(EVENTS)
        events = [asyncio.Event() for _ in range(3 * EVENTS + 1)]
        for event in events:
            wakes.post(event.set)
        counts = []
        while not events[-1].is_set():
            await asyncio.sleep(0)
            counts.append(sum(event.is_set() for event in events))
        return counts

    counts = asyncio.run(run())
    assert {EVENTS, 2 * EVENTS, 3 * EVENTS} <= set(counts)


def test_stop_iteration_beside_the_loop_is_an_error() -> None:
    """asyncio cannot end a future with it, and the request would wait for ever."""

    def exhausted() -> None:
        next(iter(()))

    async def ask() -> None:
        with ThreadPoolExecutor(1) as threads:
            await asyncio.wait_for(aside(threads, exhausted), 5)

    with pytest.raises(RuntimeError, match="StopIteration was raised"):
        asyncio.run(ask())
