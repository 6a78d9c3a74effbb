"""The unread increments of a request, and the readers that the next one wakes."""

from __future__ import annotations

from hf_paged.engine.outputs.queue import OutputQueue
from hf_paged.engine.outputs.stream import Stream


def queue_of(answers: int) -> tuple[OutputQueue, list[Stream]]:
    streams = [Stream(i, None, whole=False) for i in range(answers)]
    return OutputQueue(streams), streams


def test_increments_of_several_answers_take_turns() -> None:
    queue, (first, second) = queue_of(2)
    assert not queue
    first.add([1], [], None)
    first.add([2], [], None)
    second.add([3], [], None)
    assert queue
    assert [(each.index, each.token_ids) for each in queue.drain()] == [(0, [1]), (1, [3]), (0, [2])]
    assert not queue
    assert queue.drain() == []


def test_one_increment_at_a_time_leaves_the_others() -> None:
    queue, (first, second) = queue_of(2)
    first.add([1], [], None)
    second.add([2], [], "length")
    increment = queue.next()
    assert increment is not None
    assert increment.token_ids == [1]
    assert queue
    rest = queue.drain()
    assert [each.token_ids for each in rest] == [[2]]
    assert rest[0].finish_reason == "length"
    assert queue.next() is None


def test_readers_are_woken_by_increments_and_waiters_by_the_end() -> None:
    queue, _ = queue_of(1)
    woken: list[str] = []
    queue.readers.add(lambda: woken.append("reader"))
    queue.waiters.add(lambda: woken.append("waiter"))
    others: set[OutputQueue] = {queue}
    queue.listeners = others
    queue.put()
    assert woken == ["reader"]
    assert others
    queue.end()
    assert sorted(woken) == ["reader", "reader", "waiter"]
    assert not others
