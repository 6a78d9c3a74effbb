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


# ---- shares (contract C43)


class Named(Evictor):
    """An evictor whose blocks get their names when they come and lose them when they go, as in a pool."""

    def add(self, block, last_access, covered, tenant=""):
        self.note_name(tenant, 1)
        super().add(block, last_access, covered, tenant)
        self.tenant_of = {**getattr(self, "tenant_of", {}), block: tenant}

    def evict(self):
        block = super().evict()
        self.note_name(self.tenant_of[block], -1)
        return block


def test_c43_the_tenant_with_most_blocks_for_its_share_loses_first():
    """C43: whoever has its share or less loses nothing while another has more; what it does not use others
    have.
    """
    evictor = Named({"big": 3.0})
    for block in range(12):
        evictor.add(block, block, 16, "one")  # older than all others
    for block in range(12, 24):
        evictor.add(block, block, 16, "big")
    evictor.add(24, 99, 16, "small")
    assert evictor.counts() == {"one": 12, "big": 12, "small": 1}
    assert [evictor.evict() for _ in range(8)] == list(range(8))  # 12 of "one" to 4: a third of 12
    assert sorted(evictor.evict() for _ in range(4)) == [8, 12, 13, 14]
    assert evictor.counts() == {"one": 3, "big": 9, "small": 1}
    assert 24 not in drain(evictor)[:-3]  # a block of its own is the last that a tenant loses


def test_c43_a_flood_evicts_its_own_blocks():
    """C43: as long as the flooding tenant has more cached, the other keeps all of its own."""
    evictor = Named()
    for block in range(50):
        evictor.add(block, block, 16, "quiet")
    for block in range(50, 10_000):
        evictor.add(block, block, 16, "flood")
        if len(evictor) > 100:
            assert evictor.evict() >= 50
    assert evictor.counts() == {"quiet": 50, "flood": 50}


def test_c43_blocks_that_requests_hold_count():
    """C43: who holds most loses its cached blocks first, also if another has more of those."""
    evictor = Evictor()
    for block in range(20):
        evictor.note_name("idle", 1)
        evictor.add(block, block, 16, "idle")
    for _ in range(30):
        evictor.note_name("busy", 1)  # held
    for block in range(20, 25):
        evictor.note_name("busy", 1)
        evictor.add(block, 99, 16, "busy")
    assert [evictor.evict() for _ in range(5)] == [20, 21, 22, 23, 24]
    assert evictor.evict() == 0  # requests that run come before cached blocks


@pytest.mark.parametrize("seed", range(3))
def test_c43_a_random_walk_agrees_with_the_plainest_model(seed):
    """C20, C43: the largest tenant for its weight, held blocks included, and within it the least block of a
    sorted list.
    """
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": 2.5, "c": 0.5}
    evictor = Evictor(weights)
    cached: dict[int, tuple[str, int, int]] = {}
    held: dict[int, str] = {}

    def ratio(tenant: str) -> float:
        owners = [*held.values(), *(owner for owner, _, _ in cached.values())]
        return owners.count(tenant) / weights.get(tenant, 1.0)

    for _ in range(4000):
        block = rng.randrange(60)
        if block in cached and rng.random() < 0.4:
            evictor.remove(block)
            held[block] = cached.pop(block)[0]
        elif block in held and rng.random() < 0.5:
            cached[block] = (held.pop(block), rng.randrange(30), -rng.randrange(1, 9) * 16)
            evictor.add(block, cached[block][1], -cached[block][2], cached[block][0])
        elif block not in held and block not in cached and rng.random() < 0.8:
            held[block] = rng.choice("abcd")
            evictor.note_name(held[block], 1)
        elif cached:
            gone = evictor.evict()
            tenant, *worth = cached[gone]
            assert ratio(tenant) == max(ratio(owner) for owner, _, _ in cached.values())
            assert (*worth, gone) == min((*entry[1:], b) for b, entry in cached.items() if entry[0] == tenant)
            del cached[gone]
            evictor.note_name(tenant, -1)
        counts = {t: sum(owner == t for owner, _, _ in cached.values()) for t in "abcd"}
        assert evictor.counts() == {tenant: count for tenant, count in counts.items() if count}
