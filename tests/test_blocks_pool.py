"""States, counts and places of blocks (contract C4, C6, C7, C18 to C20, C38)."""

import random

import pytest

from hf_paged.blocks import BlockPool, BlockTable, OutOfBlocks
from hf_paged.blocks.pool import NEVER_FULL


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def books(pool: BlockPool) -> tuple[int, int, int]:
    return pool.free, pool.held, pool.cached


def lowest(pool: BlockPool, total: int, count: int) -> list[int]:
    """Where C38 puts `count` blocks of one token: the lowest run of free ones, else the lowest free ones."""
    free = [
        block
        for block in range(total)
        if not pool.references(block) and pool.names.lookup(name(block)) != block
    ]
    starts = [start for start in free if set(range(start, start + count)) <= set(free)]
    return list(range(starts[0], starts[0] + count)) if starts else free[:count]


# ---- sizes


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_any_power_of_two_is_a_block_size(size):
    assert BlockPool(4, size).block_size == size


@pytest.mark.parametrize("size", [0, -1, 3, 12, 257, 512])
def test_other_block_sizes_are_refused_with_their_value(size):
    with pytest.raises(ValueError, match=f"block_size={size} is not a power of two"):
        BlockPool(4, size)


@pytest.mark.parametrize("size", [True, 16.0, "16", None])
def test_a_block_size_is_an_int(size):
    with pytest.raises(TypeError, match="must be an int"):
        BlockPool(4, size)


def test_a_pool_of_no_blocks_gives_none():
    pool = BlockPool(0, 16)
    assert books(pool) == (0, 0, 0)
    with pytest.raises(OutOfBlocks):
        pool.take()
    with pytest.raises(ValueError, match="-1 blocks"):
        BlockPool(-1, 16)


def test_c1_blocks_for_is_the_ceiling():
    """C1: L tokens fill ceil(L / B) blocks."""
    pool = BlockPool(1, 4)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 4, 5, 7, 8, 9)] == [0, 1, 1, 2, 2, 2, 3]


# ---- the three states


def test_c7_every_move_keeps_the_sum():
    """C7: free + held + cached = total after every operation; available = free + cached."""
    pool = BlockPool(5, 4)
    assert (pool.total, pool.available) == (5, 5)
    one, two = pool.take(), pool.take()
    assert books(pool) == (3, 2, 0)
    pool.cache(one, name(1), 4)
    pool.drop(one)
    assert books(pool) == (3, 1, 1)
    assert pool.available == 4
    pool.share(one)
    assert books(pool) == (3, 2, 0)
    pool.drop(two)
    pool.drop(one)
    assert books(pool) == (4, 0, 1)
    pool.forget()
    assert books(pool) == (5, 0, 0)
    pool.check()


def test_c4_a_block_is_free_when_the_last_reference_goes():
    """C4: not before, and then at once."""
    pool = BlockPool(2, 4)
    block = pool.take()
    pool.share(block)
    pool.share(block)
    assert pool.references(block) == 3
    pool.drop(block)
    pool.drop(block)
    assert books(pool) == (1, 1, 0)
    pool.drop(block)
    assert books(pool) == (2, 0, 0)


@pytest.mark.parametrize("cached", [False, True])
def test_c4_a_double_free_names_the_block_and_changes_nothing(cached):
    """C4, for a block that became free and for one that became cached."""
    pool = BlockPool(8, 4)
    blocks = [pool.take() for _ in range(6)]
    if cached:
        pool.cache(blocks[5], name(1), 4)
    pool.drop(blocks[5])
    before = books(pool)
    with pytest.raises(ValueError, match="block 5 was freed twice"):
        pool.drop(blocks[5])
    assert books(pool) == before


def test_a_free_block_cannot_be_shared():
    pool = BlockPool(3, 4)
    with pytest.raises(ValueError, match="block 2 is free"):
        pool.share(2)
    assert books(pool) == (3, 0, 0)


def test_c7_the_peak_is_remembered():
    """C7: peak_held is the largest number held, by taking or by coming back from the cache."""
    pool = BlockPool(4, 4)
    blocks = [pool.take() for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.cache(block, name(number), 4)
        pool.drop(block)
    assert pool.peak_held == 3
    for block in blocks:
        pool.share(block)
    pool.take()
    assert pool.peak_held == 4


def test_out_of_blocks_says_what_there_is():
    pool = BlockPool(2, 16)
    pool.take(), pool.take()
    with pytest.raises(OutOfBlocks, match="all 2 blocks of 16 tokens are held"):
        pool.take()
    assert books(pool) == (0, 2, 0)


def test_growing_adds_free_blocks_and_keeps_the_rest():
    """C5, the books' part: held and cached blocks stay what they are."""
    pool = BlockPool(2, 4)
    held, cached = pool.take(), pool.take()
    pool.cache(cached, name(1), 4)
    pool.drop(cached)
    pool.grow(5)
    assert books(pool) == (3, 1, 1)
    assert [pool.take() for _ in range(3)] == [2, 3, 4]
    assert pool.names.lookup(name(1)) == cached
    assert pool.references(held) == 1
    pool.grow(5)
    with pytest.raises(ValueError, match="a pool of 5 blocks cannot shrink to 4"):
        pool.grow(4)


# ---- where blocks lie


def test_take_hands_out_the_lowest_free_block():
    pool = BlockPool(6, 4)
    blocks = [pool.take() for _ in range(6)]
    assert blocks == [0, 1, 2, 3, 4, 5]
    for block in (4, 1, 3):
        pool.drop(block)
    assert [pool.take() for _ in range(3)] == [1, 3, 4]


def test_take_prefers_the_place_that_was_asked_for_if_it_is_free():
    pool = BlockPool(6, 4)
    assert pool.take(near=3) == 3
    assert pool.take(near=3) == 0
    assert pool.take(near=6) == 1
    assert pool.take(near=-1) == 2
    assert pool.take(near=4) == 4


def test_c18_a_cached_block_is_not_taken_while_another_is_free():
    """C18: a miss takes a never used or emptied block, else evicts; a wish for a place evicts nobody."""
    pool = BlockPool(3, 4)
    block = pool.take()
    pool.cache(block, name(1), 4)
    pool.drop(block)
    assert [pool.take(near=block), pool.take()] == [1, 2]
    assert pool.names.lookup(name(1)) == block
    assert pool.take() == block
    assert pool.names.lookup(name(1)) is None
    assert pool.counts["evictions"] == 1


def test_c38_a_prompt_gets_the_lowest_run_that_is_long_enough():
    """C38: one run, lowest start, if there is one."""
    pool = BlockPool(12, 1)
    for block in range(12):
        assert pool.take() == block
    for block in (1, 3, 4, 6, 7, 8, 10, 11):
        pool.drop(block)
    assert [pool.find_run(length) for length in (1, 2, 3, 4)] == [1, 3, 6, None]
    assert pool.take_several(2) == [3, 4]
    assert pool.take_several(3) == [6, 7, 8]


def test_c38_without_a_run_the_lowest_free_indices():
    """C38: and an error if more are asked than there are; asking for a run takes nothing."""
    pool = BlockPool(8, 1)
    for _ in range(8):
        pool.take()
    for block in (6, 1, 3, 4):
        pool.drop(block)
    assert pool.find_run(0) is None
    assert pool.find_run(3) is None
    assert books(pool) == (4, 4, 0)
    assert pool.take_several(0) == []
    assert pool.take_several(3) == [1, 3, 4]
    assert pool.take_several(1) == [6]
    with pytest.raises(OutOfBlocks):
        pool.take_several(1)


def test_c38_a_table_that_begins_there_takes_exactly_these():
    """C38: an empty table's first tokens, in any state of the pool."""
    rng = random.Random(38)
    pool, tables = BlockPool(60, 1), []
    for _ in range(400):
        count = rng.randrange(1, 12)
        if count > pool.free:
            tables.pop(rng.randrange(len(tables))).free()
            continue
        expected = lowest(pool, 60, count)
        table = BlockTable(pool)
        table.append(count)
        assert table.blocks == expected
        tables.append(table)
        if rng.random() < 0.4:
            tables.pop(rng.randrange(len(tables))).free()
        pool.check()


def test_c38_cached_blocks_are_not_part_of_a_run():
    """C38: a run is of free blocks."""
    pool = BlockPool(4, 1)
    blocks = [pool.take() for _ in range(4)]
    pool.cache(blocks[1], name(1), 1)
    for block in blocks:
        pool.drop(block)
    assert pool.take_several(2) == [2, 3]
    pool.drop_several([2, 3])
    assert pool.take_several(3) == [0, 2, 3]


# ---- names


def test_c19_a_named_block_stays_matchable_until_it_is_evicted():
    """C19: freed hashed blocks go to the evictor and stay matchable."""
    pool = BlockPool(2, 4)
    block = pool.take()
    assert pool.cache(block, name(1), 4) == block
    pool.drop(block)
    assert pool.names.lookup(name(1)) == block
    pool.take(), pool.take()
    assert pool.names.lookup(name(1)) is None


def test_c18_a_hit_in_the_evictor_is_taken_out_and_still_valid():
    """C18: in use again it cannot be evicted, and its name stays."""
    pool = BlockPool(2, 4)
    block, other = pool.take(), pool.take()
    for number, each in enumerate((block, other)):
        pool.cache(each, name(number), 4)
        pool.drop(each)
    pool.share(block)
    assert pool.take() == other
    with pytest.raises(OutOfBlocks):
        pool.take()
    assert pool.names.lookup(name(0)) == block


def test_c20_the_last_access_decides_and_never_goes_back():
    """C20: the latest stamp of all that dropped a block counts, not that of the last one that did."""
    pool = BlockPool(2, 4)
    first, second = pool.take(), pool.take()
    pool.cache(first, name(1), 4)
    pool.cache(second, name(2), 4)
    pool.share(first)
    pool.drop(first, last_access=9)
    pool.drop(first, last_access=1)
    pool.drop(second, last_access=5)
    assert [pool.take(), pool.take()] == [second, first]


def test_c20_a_reused_block_starts_without_a_past():
    """C20: the stamps of evicted content do not protect what comes after it."""
    pool = BlockPool(2, 4)
    old, new = pool.take(), pool.take()
    pool.cache(old, name(1), 4)
    pool.drop(old, last_access=1000)
    assert pool.take() == old
    pool.cache(old, name(2), 4)
    pool.cache(new, name(3), 4)
    pool.drop(old, last_access=3)
    pool.drop(new, last_access=4)
    assert pool.take() == old


def test_c17_the_second_of_equal_contents_gets_the_first():
    """C17: publish answers with the block that bears the name; the other stays without one."""
    pool = BlockPool(3, 4)
    first, second = pool.take(), pool.take()
    assert pool.cache(first, name(1), 4) == first
    assert pool.cache(first, name(1), 4) == first
    assert pool.cache(second, name(1), 4) == first
    pool.drop(second)
    assert books(pool) == (2, 1, 0)


def test_a_block_has_one_name():
    pool = BlockPool(2, 4)
    block = pool.take()
    pool.cache(block, name(1), 4)
    assert pool.cache(block, name(2), 4) is None
    assert (pool.names.lookup(name(1)), pool.names.lookup(name(2))) == (block, None)
    pool.drop(block)
    pool.check()


def test_c25_a_name_that_other_content_has_taken_is_not_lent():
    """C25: other tokens, or another place in the sequence, are not the same content whatever the digest
    says.
    """
    pool = BlockPool(4, 2)
    first, second = pool.take(), pool.take()
    pool.cache(first, name(1), 2, (5, 6))
    assert pool.cache(second, name(1), 2, (5, 7)) is None
    assert pool.cache(second, name(1), 4) is None
    assert pool.cache(second, name(1), 2, (5, 6)) == first
    assert pool.names.tokens(first) == (5, 6)
    assert pool.names.tokens(second) == ()


def test_c25_tokens_that_were_kept_are_not_lost_by_a_second_publication():
    """C25: and they are added when they come later."""
    pool = BlockPool(2, 2)
    block = pool.take()
    pool.cache(block, name(1), 2)
    assert pool.names.tokens(block) == ()
    pool.cache(block, name(1), 2, (5, 6))
    pool.cache(block, name(1), 2)
    assert pool.names.tokens(block) == (5, 6)


def test_c22_only_held_blocks_are_published():
    """C22: a free or cached block belongs to no forward that could have filled it."""
    pool = BlockPool(2, 4)
    with pytest.raises(ValueError, match="block 0 is not held"):
        pool.cache(0, name(1), 4)
    pool.cache(pool.take(), name(1), 4)
    pool.drop(0)
    with pytest.raises(ValueError, match="block 0 is not held"):
        pool.cache(0, name(2), 4)


def test_withdraw_takes_the_name_and_leaves_the_block():
    pool = BlockPool(2, 4)
    block = pool.take()
    pool.uncache(block)
    pool.cache(block, name(1), 4)
    pool.uncache(block)
    assert pool.names.lookup(name(1)) is None
    pool.drop(block)
    assert books(pool) == (2, 0, 0)
    pool.check()


def test_forget_frees_what_is_cached_and_unnames_what_is_held():
    """C24: after a change of weights nobody matches anything."""
    pool = BlockPool(4, 4)
    held, cached = pool.take(), pool.take()
    pool.cache(held, name(1), 4)
    pool.cache(cached, name(2), 4)
    pool.drop(cached)
    pool.forget()
    assert (pool.names.lookup(name(1)), pool.names.lookup(name(2))) == (None, None)
    assert books(pool) == (3, 1, 0)
    assert pool.take() == cached
    pool.drop(held)
    assert books(pool) == (3, 1, 0)


# ---- the audit


def test_check_finds_a_block_that_no_table_names():
    pool = BlockPool(3, 4)
    pool.take()
    with pytest.raises(AssertionError, match="block 0 has 1 references but 0 tables name it"):
        pool.check()


def test_check_finds_a_table_without_a_reference():
    """C6: the count of a block is the number of tables that name it."""
    pool = BlockPool(3, 4)
    table, thief = BlockTable(pool), BlockTable(pool)
    table.append(4)
    thief.blocks, thief.length = list(table.blocks), 4
    with pytest.raises(AssertionError, match="block 0 has 1 references but 2 tables name it"):
        pool.check()


def test_check_finds_a_table_of_the_wrong_size():
    """C1: no more and no fewer blocks than the tokens need."""
    pool = BlockPool(3, 4)
    table = BlockTable(pool)
    table.append(8)
    table.length = 4
    with pytest.raises(AssertionError, match="ends at block 2, its tokens at 1"):
        pool.check()


@pytest.mark.parametrize("fault", ["_held", "_lowest_free", "_state", "names", "_evictor"])
def test_check_finds_books_that_were_tampered_with(fault):
    """C7: each of the books is recounted, and `recover` makes them whole, as after an interrupt."""
    pool = BlockPool(4, 4)
    block = pool.take()
    pool.cache(block, name(1), 4)
    pool.drop(block)
    pool.check()
    if fault == "_held":
        pool._held += 1
    elif fault == "_lowest_free":
        pool._lowest_free = 3
    elif fault == "_state":
        pool._state[2] = 1
    elif fault == "names":
        pool.names.of.clear()
    else:
        pool._evictor.evict()
    with pytest.raises(AssertionError):
        pool.check()
    pool.recover()
    pool.check()


# ---- several at once


def random_pool(rng, total, size):
    """A pool with holes, names and cached blocks."""
    pool = BlockPool(total, size)
    blocks = [pool.take() for _ in range(total)]
    for block in blocks:
        if rng.random() < 0.3:
            pool.cache(block, name(block), size)
    for block in rng.sample(blocks, rng.randrange(total)):
        pool.drop(block, rng.randrange(9))
    return pool


@pytest.mark.parametrize("size", [2, 16])
def test_several_are_taken_as_one_by_one(size):
    """C3: with blocks of several tokens each comes after the one before it if that is free, else from the
    lowest place.
    """
    for seed in range(300):
        one, other = (random_pool(random.Random(seed), 24, size) for _ in range(2))
        count, near = random.Random(seed).randrange(1, 10), random.Random(-seed).randrange(-1, 26)
        if count > one.available:
            continue
        expected = []
        for _ in range(count):
            expected.append(one.take(expected[-1] + 1 if expected else near))
        assert other.take_several(count, near) == expected
        assert (one.held, one.free, one.cached, one.peak_held) == (
            other.held,
            other.free,
            other.cached,
            other.peak_held,
        )
        assert [one.references(block) for block in range(24)] == [
            other.references(block) for block in range(24)
        ]
        assert one.take() == other.take() if one.available else True


def test_c38_several_tokens_go_where_all_of_them_can():
    """C38: the place that was asked for if all are free there, else the lowest run, else the lowest free
    indices.
    """
    for seed in range(300):
        rng = random.Random(seed)
        pool, near, count = random_pool(rng, 24, 1), rng.randrange(-1, 26), rng.randrange(1, 9)
        if count > pool.free:
            continue
        free = [
            block
            for block in range(24)
            if not pool.references(block) and pool.names.lookup(name(block)) != block
        ]
        there = list(range(near, near + count))
        expected = there if set(there) <= set(free) else lowest(pool, 24, count)
        assert pool.take_several(count, near) == expected


def test_several_are_dropped_as_one_by_one():
    """C4, C19: shared ones stay, named ones are cached, the rest are free."""
    for seed in range(200):
        rng = random.Random(seed)
        one, other = (random_pool(random.Random(seed), 24, 1) for _ in range(2))
        held = [block for block in range(24) if one.references(block)]
        for block in rng.sample(held, len(held) // 3):
            one.share(block), other.share(block)
        going = rng.sample(held, rng.randrange(len(held) + 1))
        for block in going:
            one.drop(block, 7)
        other.drop_several(going, 7)
        assert (one.held, one.free, one.cached) == (other.held, other.free, other.cached)
        assert [one.take() for _ in range(one.available)] == [other.take() for _ in range(other.available)]
    pool = BlockPool(4, 1)
    blocks = pool.take_several(3)
    with pytest.raises(ValueError, match="block 1 was freed twice"):
        pool.drop_several([blocks[1], blocks[0], blocks[1]])
    assert pool.held == 1


class Chains:
    """The plainest books of a pool whose blocks hold what all their tokens have come to: names in a list, one
    search through all of them for each question.
    """

    def __init__(self) -> None:
        self.worth = 0
        self.named: dict[tuple[int, ...], int] = {}
        """The block of each."""
        self.cached: dict[tuple[int, ...], tuple[int, int]] = {}
        """When each was used last: what was evicted before was worth, and the time."""

    def shorter(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        return max(
            (each for each in self.named if tokens[: len(each)] == each != tokens), key=len, default=()
        )

    def evict(self) -> int:
        def worth(tokens: tuple[int, ...]) -> tuple[int, ...]:
            since, last = self.cached[tokens]
            return since + len(tokens) - len(self.shorter(tokens)), last, -len(tokens), self.named[tokens]

        least = min(self.cached, key=worth)
        inner = self.shorter(least)
        followers = [each for each in self.named if inner and each[: len(inner)] == inner != each]
        if followers == [least] and inner in self.cached:
            least = inner
        else:
            self.worth = worth(least)[0]
        del self.cached[least]
        return self.named.pop(least)


@pytest.mark.parametrize("seed", range(4))
def test_c20_snapshots_go_by_the_tokens_that_they_save(seed):
    """C20 against books that search everything: names come, go, are used again and evicted."""
    chance = random.Random(seed)
    pool, books, held = BlockPool(10, NEVER_FULL), Chains(), {}
    for time in range(1, 600):
        tokens = tuple(chance.choices("ab", k=chance.randrange(1, 9)))
        if held and chance.random() < 0.4:
            tokens = chance.choice([*held])
        if tokens in books.named:
            block = books.named[tokens]
            if tokens in held:
                pool.drop(block, held.pop(tokens))
                books.cached[tokens] = (books.worth, time - 1)
            elif chance.random() < 0.1:
                pool.discard(block)
                del books.named[tokens], books.cached[tokens]
            else:
                pool.share(block)
                del books.cached[tokens]
                held[tokens] = time
        elif len(held) < 5:
            gone = books.evict() if not pool.free else None
            block = pool.take()
            assert gone in (None, block)
            assert pool.cache(block, "".join(tokens).encode(), len(tokens), tokens, b"chain") == block
            books.named[tokens] = block
            held[tokens] = time
        for each in held:
            held[each] = time
    assert pool.counts["evictions"] > 50
