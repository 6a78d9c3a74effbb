"""hf_paged.engine.parallel.connections: the end of a process is known at once (C42)."""

from __future__ import annotations

import threading
import time
from typing import Any

from hf_paged.engine.parallel.connections import Connections

SIZE = 3


def _connected() -> dict[int, Connections]:
    """Three ranks, as threads that meet as ranks do."""
    meeting = threading.Barrier(SIZE, timeout=20)
    values: list[Any] = [None] * SIZE
    found: dict[int, Connections] = {}

    def join(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            meeting.wait()
            met = list(values)
            meeting.wait()
            return met

        found[rank] = Connections(rank, gather)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(SIZE)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def _closed(connections: Connections) -> list[int]:
    end = time.monotonic() + 5
    found: list[int] = []
    while not found and time.monotonic() < end:
        found = connections.closed()
    return found


def test_rank_0_knows_who_has_ended() -> None:
    ranks = _connected()
    assert ranks[0].closed() == []
    ranks[2].close()
    assert _closed(ranks[0]) == [2]
    assert ranks[0].closed() == []  # named once
    assert ranks[1].closed() == []
    ranks[0].close()
    assert _closed(ranks[1]) == [0]
    ranks[1].close()
    ranks[1].close()
