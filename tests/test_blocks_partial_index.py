"""Cached blocks that follow one prefix: the best match is found by a few comparisons."""

from __future__ import annotations

import random

from hf_paged.blocks import (
    PartialBlockIndex,
)


def test_flooding_one_place_costs_others_no_search() -> None:
    """Thousands of blocks behind one beginning: a few comparisons find the best, whatever their tokens."""
    partial_index = PartialBlockIndex()
    rng = random.Random(1)
    blocks = {tuple(rng.randrange(3) for _ in range(16)): number for number in range(4000)}
    for tokens, number in blocks.items():
        partial_index.add(b"seat", tokens, number)
    compared = 0

    class Counted(int):
        def __lt__(self, other: int) -> bool:
            nonlocal compared
            compared += 1
            return int(self) < int(other)

    for _ in range(50):
        wanted = [rng.randrange(3) for _ in range(16)]
        best = partial_index.best(b"seat", [Counted(token) for token in wanted])
        longest = max(next((i for i in range(16) if tokens[i] != wanted[i]), 16) for tokens in blocks)
        assert (best[1] if best else 0) == longest
    assert compared < 50 * 40
    for tokens, number in blocks.items():
        partial_index.remove(b"seat", tokens, number)
    assert len(partial_index) == 0
    assert partial_index.best(b"seat", [1]) is None
