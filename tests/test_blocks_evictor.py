"""The order in which cached blocks go (contract C20)."""

import random

import pytest

from hf_paged.blocks import Evictor


def drain(evictor: Evictor) -> list[int]:
    return [evictor.evict() for _ in range(len(evictor))]


def test_c20_the_least_recently_used_goes_first_whatever_the_order_of_insertion():
    """C20: order is by last access, not by insertion."""
    evictor = Evictor()
    for block, last_access in ((7, 30), (3, 10), (5, 20)):
        evictor.add(block, last_access, covered=16)
    assert drain(evictor) == [3, 5, 7]


def test_c20_among_equals_the_one_that_covers_most_tokens_goes_first():
    """C20: the end of a prefix goes before its beginning."""
    evictor = Evictor()
    for block, covered in ((1, 32), (2, 64), (3, 16), (4, 48)):
        evictor.add(block, 9, covered)
    assert drain(evictor) == [2, 4, 1, 3]


def test_c20_age_counts_before_depth():
    """C20: a shallow block of an old access goes before a deep one of a recent access."""
    evictor = Evictor()
    evictor.add(1, last_access=2, covered=4096)
    evictor.add(2, last_access=1, covered=16)
    assert drain(evictor) == [2, 1]


def test_c18_a_block_that_was_taken_out_is_not_evicted():
    """C18: a hit in the evictor is taken out, and its old entry counts for nothing when it comes back
    later.
    """
    evictor = Evictor()
    evictor.add(1, 1, 16)
    evictor.add(2, 2, 16)
    evictor.remove(1)
    assert 1 not in evictor
    assert 2 in evictor
    evictor.add(1, 3, 16)
    assert drain(evictor) == [2, 1]


def test_a_block_that_comes_back_with_the_same_worth_is_evicted_once():
    evictor = Evictor()
    evictor.add(1, 1, 16)
    evictor.remove(1)
    evictor.add(1, 1, 16)
    assert drain(evictor) == [1]
    with pytest.raises(ValueError, match="nothing to evict"):
        evictor.evict()


def test_c20_the_heap_does_not_outgrow_what_it_holds():
    """C20: O(log n) per block; deleted entries are swept up as their number grows, not kept for ever."""
    evictor = Evictor()
    for block in range(100):
        evictor.add(block, block, 16)
    for time in range(100, 5000):
        evictor.remove(time % 100)
        evictor.add(time % 100, time, 16)
        assert len(evictor._queues[""].heap) <= 2 * len(evictor) + 66
    assert drain(evictor) == [*range(100)]


def test_mistakes_name_the_block():
    evictor = Evictor()
    with pytest.raises(ValueError, match="block 4 is not up for eviction"):
        evictor.remove(4)
    evictor.add(4, 1, 16)
    with pytest.raises(ValueError, match="block 4 is up for eviction already"):
        evictor.add(4, 2, 16)
    with pytest.raises(ValueError, match="nothing to evict"):
        Evictor().evict()


def test_c20_a_random_walk_agrees_with_sorting():
    """C20 against the plainest model there is: a sorted list."""
    rng = random.Random(20)
    evictor, model = Evictor(), dict[int, tuple[int, int]]()
    for _ in range(4000):
        block = rng.randrange(40)
        if block in model and rng.random() < 0.5:
            evictor.remove(block)
            del model[block]
        elif block not in model:
            model[block] = (rng.randrange(30), -rng.randrange(1, 9) * 16)
            evictor.add(block, model[block][0], -model[block][1])
        elif model and rng.random() < 0.3:
            least = min(model.values())
            assert model.pop(evictor.evict()) == least
        assert len(evictor) == len(model)
        assert set(evictor) == set(model)


def test_what_saves_more_stays_longer_and_not_for_ever():
    """C20: a block is worth what it saves beyond what was evicted before its last use."""
    evictor = Evictor()
    evictor.add(0, 0, 100, saves=100)
    found = []
    for time in range(1, 15):
        evictor.add(time, time, 10, saves=10)
        found.append(evictor.evict())
    assert found == [*range(1, 10), 0, *range(10, 14)]
    assert drain(evictor) == [14]


def test_a_block_that_saves_more_than_before_stays_longer():
    evictor = Evictor()
    for block in range(3):
        evictor.add(block, block, 10, saves=10)
    evictor.change(0, 15)
    evictor.change(2, 5)
    assert drain(evictor) == [2, 1, 0]


def test_tenants_have_queues_of_their_own():
    """C43: what one tenant uses does not change which block of another goes first; empty queues are forgotten."""
    evictor = Evictor()
    for block in range(6):
        evictor.add(block, 10 - block, 16, "one" if block < 4 else "two")
    assert evictor.counts() == {"one": 4, "two": 2}
    assert [evictor.evict("one"), evictor.evict("two"), evictor.evict("one")] == [3, 5, 2]
    evictor.remove(4)
    assert evictor.counts() == {"one": 2}
    with pytest.raises(ValueError, match="nothing to evict"):
        evictor.evict("two")
