"""A plan in the making: budgets, copies, and blocks that copies are made of."""

from __future__ import annotations

import pytest
from scheduling_prompts import prompt
from simulated import Simulated

from hf_paged.scheduling import Request


def test_a_prompt_in_chunks_samples_once() -> None:
    """C32, C27: chunks that do not reach the last token choose nothing, and no step is longer than its
    budget.
    """
    world = Simulated.of(total=20, tokens=5, sequences=2)
    world.submit(Request(0, prompt(12), 14))
    plans = world.run()
    assert [(row.start, row.count, len(row.samples)) for plan in plans for row in plan.rows] == [
        (0, 5, 0),
        (5, 5, 0),
        (10, 2, 1),
        (12, 1, 1),
    ]
    world.assert_answered()
    world.assert_empty()


def test_decoding_goes_before_prompts() -> None:
    """C27: a long prompt takes what the running ones leave of the budget, and they never wait for it."""
    world = Simulated.of(total=40, tokens=6, sequences=4)
    world.submit(Request(0, prompt(2), 10))
    world.step()
    world.submit(Request(1, prompt(14, 5), 16))
    plan = world.step()
    assert [(row.sequence.group.request.number, row.count) for row in plan.rows] == [(0, 1), (1, 5)]
    world.run()
    world.assert_answered()


def test_the_source_of_a_copy_is_not_taken_in_its_step() -> None:
    """C15: two requests of one step copy parts of cached blocks, and the pool has room for one copy at a
    time.
    """
    world = Simulated.of(total=3, size=4, tokens=32, sequences=4)
    for number, beginning in enumerate(((1, 2, 3, 4), (5, 6, 7, 8))):
        world.submit(Request(number, beginning, 5))
    world.run()
    assert (world.pools[0].cached, world.pools[0].free) == (2, 1)
    groups = [world.submit(Request(2, (1, 2, 3, 9), 5)), world.submit(Request(3, (5, 6, 7, 9), 5))]
    world.run()
    assert [group.cached_tokens for group in groups] == [3, 0]
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize("admission", ["watermark", "future"])
def test_a_request_that_needs_every_block_copies_none(admission: str) -> None:
    """C8, C21: it is admitted to an empty pool, although a cached block begins as it does."""
    world = Simulated.of(total=3, size=4, tokens=32, sequences=4, admission=admission)
    world.submit(Request(0, (1, 2, 3, 4), 5))
    world.run()
    group = world.submit(Request(1, (1, 2, 3, *range(20, 28)), 12))
    world.run()
    assert group.cached_tokens == 0
    world.assert_answered()
    world.assert_empty()


def test_partly_shared_blocks_in_a_full_pool() -> None:
    """C15, C21: blocks that are copied in a step are not written in it, however few there are."""
    world = Simulated.of(total=8, size=8, tokens=32, sequences=4)
    world.submit(Request(0, prompt(20), 24))
    world.run()
    for number in range(1, 12):
        world.submit(Request(number, (*prompt(10 + number % 7), 40 + number), 24))
    world.run()
    world.assert_answered()
    world.assert_empty()
