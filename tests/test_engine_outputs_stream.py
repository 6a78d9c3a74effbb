"""An answer as it grows, read token by token or all at once."""

from __future__ import annotations

from hf_paged.engine.outputs.output import NewTokens, TokenLogprob
from hf_paged.engine.outputs.queue import OutputQueue
from hf_paged.engine.outputs.stream import Stream


def notes(*tokens: int) -> list[TokenLogprob]:
    return [TokenLogprob(each, -1.0) for each in tokens]


def test_unread_tokens_come_in_one_piece_and_once() -> None:
    stream = Stream(0, None, whole=False)
    queue = OutputQueue([stream])
    assert queue.drain_tokens() == []
    for token in (5, 6, 7):
        stream.add([token], [], None)
    assert queue.drain_tokens() == [NewTokens(0, [5, 6, 7], None, None)]
    assert queue.drain_tokens() == []
    stream.add([8], [], "stop")
    assert queue.drain_tokens() == [NewTokens(0, [8], "stop", None)]
    assert queue.drain_tokens() == []


def test_an_end_that_comes_apart_is_a_piece_of_its_own() -> None:
    """So is the last token no token of the end, as in the increments of `read()`."""
    stream = Stream(0, None, whole=False)
    stream.add([5, 6], [], None)
    stream.add([], [], "abort")
    assert OutputQueue([stream]).drain_tokens() == [
        NewTokens(0, [5, 6], None, None),
        NewTokens(0, [], "abort", None),
    ]


def test_answers_of_a_request_are_read_with_their_logprobs() -> None:
    streams = [Stream(i, None, whole=False) for i in range(2)]
    queue = OutputQueue(streams)
    streams[1].add([3], notes(3), None)
    streams[0].add([1], notes(1), None)
    streams[0].add([2], notes(2), "length")
    assert queue.drain_tokens() == [
        NewTokens(0, [1, 2], "length", notes(1, 2)),
        NewTokens(1, [3], None, notes(3)),
    ]
