"""Wake-ups across threads, and turns of the event loop."""

from __future__ import annotations

import asyncio
import threading

from hf_paged.serve.mailbox import MOST_EVENTS, Mailbox, Turns


def test_every_event_is_set_and_many_in_one_wake_up() -> None:
    async def run() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        calls = 0
        call = loop.call_soon_threadsafe

        def counted(*given):
            nonlocal calls
            calls += 1
            return call(*given)

        loop.call_soon_threadsafe = counted
        mailbox = Mailbox()
        mailbox.open()
        events = [asyncio.Event() for _ in range(500)]
        thread = threading.Thread(target=lambda: [mailbox.post(event) for event in events])
        thread.start()
        thread.join()  # the loop is held up meanwhile
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 30)
        first = calls
        again = asyncio.Event()
        mailbox.post(again)
        await asyncio.wait_for(again.wait(), 30)
        return first, calls - first

    assert asyncio.run(run()) == (1, 1)


def test_a_loop_that_is_over_is_no_error() -> None:
    mailbox = Mailbox()

    async def run() -> None:
        mailbox.open()

    asyncio.run(run())
    mailbox.post(asyncio.Event())


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


def test_many_events_take_several_turns() -> None:
    """What else is ready runs in between: a step of many streams does not hold up /health."""

    async def run() -> list[int]:
        mailbox = Mailbox()
        mailbox.open()
        events = [asyncio.Event() for _ in range(3 * MOST_EVENTS + 1)]
        for event in events:
            mailbox.post(event)
        counts = []
        while not events[-1].is_set():
            await asyncio.sleep(0)
            counts.append(sum(event.is_set() for event in events))
        return counts

    counts = asyncio.run(run())
    assert {MOST_EVENTS, 2 * MOST_EVENTS, 3 * MOST_EVENTS} <= set(counts)
