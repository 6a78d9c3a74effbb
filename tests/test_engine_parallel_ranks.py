"""Ranks that wait for a step to begin are not said to hang."""

from __future__ import annotations

import pytest

from hf_paged.engine.parallel.ranks import waited_for


@pytest.mark.parametrize(
    ("begun", "expected"), [([5, 3, 7], [1]), ([4, 4, 6], [0, 1]), ([4, 4, 4], []), ([2], [])]
)
def test_ranks_that_wait_are_not_said_to_hang(begun: list[int], expected: list[int]) -> None:
    """On devices those that wait have not begun equally many collectives (C42)."""
    assert waited_for(begun) == expected
