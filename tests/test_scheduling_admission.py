"""There is room: now, later, never (contract C8, C9, C11, C40's place is empty)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.blocks import BlockPool, Full, Window
from hf_paged.scheduling import KVCacheGroup, Limits, Request, SequenceGroup, has_room, why_infeasible
from hf_paged.scheduling.admission import headroom


def test_the_watermark_is_exact() -> None:
    """C8: total=100, wm=1: 99 may fit, 100 never does; a remainder of exactly wm is enough, wm - 1 is not."""
    reserve = Limits(1, 1).reserve(KVCacheGroup(Full(), BlockPool(100, 4)))
    assert reserve == 1
    assert has_room(100, 100, 99, reserve=reserve)
    assert not has_room(100, 100, 100, reserve=reserve)
    assert has_room(100, 50, 49, reserve=reserve)
    assert not has_room(100, 50, 50, reserve=reserve)


def test_never_looks_at_the_whole_need() -> None:
    """C8: hits make no impossible request possible."""
    assert not has_room(10, 10, 11, hits=8)
    assert has_room(10, 2, 10, hits=8)


def test_a_cached_hit_is_not_counted_twice() -> None:
    """C9: the block that is hit cannot hold the rest of the need as well."""
    assert has_room(10, 4, 5, hits=2)
    assert not has_room(10, 4, 5, hits=2, cached_hits=2)
    assert has_room(10, 5, 5, hits=2, cached_hits=2)


@given(
    total=st.integers(1, 50),
    available=st.integers(0, 50),
    need=st.integers(0, 60),
    hits=st.integers(0, 60),
    reserve=st.integers(0, 5),
)
def test_room_leaves_the_reserve(total: int, available: int, need: int, hits: int, reserve: int) -> None:
    available, hits = min(available, total), min(hits, need)
    if has_room(total, available, need, hits=hits, reserve=reserve):
        assert total - need >= reserve
        assert available - (need - hits) >= reserve


def test_infeasible_says_both_numbers() -> None:
    """C11: the whole group at full length, full blocks of the prompt once, against the total without the
    watermark.
    """
    kv_group, limits = KVCacheGroup(Full(), BlockPool(20, 4)), Limits(16, 4, 0.1)
    # 9 prompt tokens fill 2 blocks; 3 sequences of 20 tokens need 3 more each: 11. At 36 tokens 2 + 3 * 7 =
    # 23, of 18.
    assert why_infeasible(Request(0, tuple(range(9)), 20, width=3), [kv_group], limits) is None
    reason = why_infeasible(Request(0, tuple(range(9)), 36, width=3), [kv_group], limits)
    assert reason is not None
    assert "23 blocks" in reason
    assert "18 can be had" in reason


def test_a_group_must_fit_the_sequence_budget() -> None:
    """C11: its sequences against the sequence budget; with it goes one decoding step against the token
    budget.
    """
    reason = why_infeasible(
        Request(0, (1, 2), 4, width=5), [KVCacheGroup(Full(), BlockPool(100, 4))], Limits(16, 4)
    )
    assert reason is not None
    assert "5 sequences" in reason
    assert "at most 4" in reason


def test_a_window_needs_few_blocks() -> None:
    """C10, C11: behind a window no sequence is too long, however long it becomes."""
    limits = Limits(8, 4)
    assert (
        why_infeasible(Request(0, (1,) * 9, 4000), [KVCacheGroup(Window(8), BlockPool(6, 4))], limits) is None
    )
    assert (
        why_infeasible(Request(0, (1,) * 9, 4000), [KVCacheGroup(Full(), BlockPool(6, 4))], limits)
        is not None
    )


def test_the_room_that_is_left_doubles() -> None:
    """C31: with each time that a group had to go, for each sequence and up to what each can come to need;
    alone it never waits.
    """
    kv_groups = (KVCacheGroup(Full(), BlockPool(40, 4)),)
    group = SequenceGroup(Request(0, (1,) * 8, 48), kv_groups)  # 2 blocks now, 12 at its end
    others = [
        SequenceGroup(Request(1, (1,) * 8, 20), kv_groups),
        SequenceGroup(Request(2, (1,) * 8, 400, width=2), kv_groups),
    ]  # 5 blocks, 198 blocks
    found = []
    for setbacks in (2, 3, 4, 5, 20):
        group.setbacks = setbacks
        found.append(headroom(group, 2, others, 0, 16))
    assert found == [2 + 2 + 4, 4 + 4 + 8, 8 + 5 + 16, 10 + 5 + 32, 10 + 5 + 198]
    group.request = Request(0, (1,) * 8, 4000)  # as if it might become longer than the pool
    assert has_room(40, 40, 2, reserve=headroom(group, 2, [], 0, 16))


@pytest.mark.parametrize(
    ("tokens", "sequences", "watermark", "wrong"),
    [
        (4, 5, 0.01, "one token of each of 5"),
        (4, 0, 0.01, "0 sequences"),
        (4, 4, 1.0, "watermark"),
        (4, 4, -0.1, "watermark"),
    ],
)
def test_limits_are_checked(tokens: int, sequences: int, watermark: float, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Limits(tokens, sequences, watermark)
