"""How much of a prompt a pool hands out, to the token (contract C10, C15, C18, C20, C21)."""

from __future__ import annotations

import pytest

from hf_paged.blocks import (
    BlockPool,
    BlockTable,
    Copy,
    Full,
    LayerKind,
    PrefixLookup,
    Prompt,
    Window,
    adopt,
    append,
    commit,
    commit_tail,
    detach,
)

TOKENS = list(range(100, 121))  # 21 tokens: five blocks of four, and one more


def kind_of(window: int | None) -> LayerKind:
    return Full() if window is None else Window(window)


def left_behind(pool: BlockPool, tokens: list[int], extra: bytes = b"") -> BlockTable:
    """A sequence that was computed, named with its tail, and freed."""
    table = BlockTable(pool)
    table.append(len(tokens))
    commit(table, tokens, extra, keep_tokens=True)
    commit_tail(table, tokens, extra)
    table.free()
    return table


def reach(
    pool: BlockPool, tokens: list[int], most: int | None = None, window: int | None = None, extra: bytes = b""
) -> int:
    return PrefixLookup(pool, Prompt(tokens, pool.block_size, extra), kind_of(window)).reach(
        len(tokens) - 1 if most is None else most
    )


def taken(pool: BlockPool, tokens: list[int], most: int) -> tuple[BlockTable, list[Copy]]:
    """A table that begins with `most` of the tokens."""
    lookup = PrefixLookup(pool, Prompt(tokens, pool.block_size))
    assert lookup.reach(most) == most
    table = BlockTable(pool)
    adopt(table, lookup.take(most))
    copies = detach([table])
    pool.check()
    return table, copies


def evict(pool: BlockPool, block: int) -> None:
    """Give up one cached block, whatever its age."""
    pool.share(block)
    pool.uncache(block)
    pool.drop(block)


# ---- reach


@pytest.mark.parametrize("shared", range(22))
def test_a_prompt_reaches_as_far_as_its_tokens_do(shared: int) -> None:
    """C18: whole blocks, and the part of one, unless that is a single token of several."""
    pool = BlockPool(16, 4)
    left_behind(pool, TOKENS)
    other = [*TOKENS[:shared], *[7] * (30 - shared)]
    assert reach(pool, other) == (shared - 1 if shared % 4 == 1 and shared < len(TOKENS) else shared)


@pytest.mark.parametrize("most", range(21))
def test_c21_no_further_than_it_may(most: int) -> None:
    """C21: whoever must compute some tokens computes them, in the middle of a cached block too."""
    pool = BlockPool(16, 4)
    left_behind(pool, TOKENS)
    assert reach(pool, TOKENS, most) == (most - 1 if most % 4 == 1 else most)


def test_a_tail_that_is_not_full_is_found() -> None:
    """A chat's next turn goes on from the last token of the turn before."""
    pool = BlockPool(16, 16)
    left_behind(pool, TOKENS)
    assert reach(pool, [*TOKENS, 1, 2, 3]) == 21
    assert reach(pool, [*TOKENS[:19], 1, 2, 3]) == 19


def test_the_best_of_many_siblings_is_found() -> None:
    pool = BlockPool(64, 4)
    for tail in ([1, 2, 3, 4], [1, 2, 9, 9], [1, 3, 3, 3], [2, 2], [1, 2, 3]):
        left_behind(pool, [*TOKENS[:4], *tail])
    for tail, expected in (
        ([1, 2, 3, 9], 3),
        ([1, 2, 9, 8], 3),
        ([1, 2, 0, 0], 2),
        ([1, 3, 3, 9], 3),
        ([2, 2, 5, 5], 2),
        ([3, 1, 1, 1], 0),
    ):
        assert reach(pool, [*TOKENS[:4], *tail, 0]) == 4 + expected


def test_c24_another_key_finds_no_part_of_a_block_either() -> None:
    """C24: at the very beginning, where the parent is the same for all, too."""
    pool = BlockPool(16, 4)
    left_behind(pool, TOKENS, b"one tenant")
    assert reach(pool, TOKENS, extra=b"one tenant") == 20
    assert reach(pool, TOKENS, extra=b"another") == 0
    assert reach(pool, TOKENS[:3], most=3, extra=b"another") == 0


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9, 30])
def test_c10_behind_a_window_only_what_it_shows_is_needed(window: int) -> None:
    """C10: the beginning may be gone; whoever goes on gets the blocks that the next token looks at."""
    pool = BlockPool(16, 4)
    table = BlockTable(pool)
    table.append(20)
    commit(table, TOKENS, keep_tokens=True)
    blocks = list(table.blocks)
    table.free()
    first = max(0, 20 - window + 1) // 4
    for block in blocks[:first]:
        evict(pool, block)
    lookup = PrefixLookup(pool, Prompt(TOKENS, 4), kind_of(window))
    assert lookup.reach(20) == 20
    match = lookup.take(20)
    assert (match.blocks, match.released, len(match.digests)) == (blocks[first:], first, 5)
    again = BlockTable(pool)
    adopt(again, match)
    assert (again.length, again.released) == (20, first)
    pool.check()
    again.free()
    if first < 5:
        evict(pool, blocks[first])
        assert PrefixLookup(pool, Prompt(TOKENS, 4), kind_of(window)).reach(20) < 20
    assert PrefixLookup(pool, Prompt(TOKENS, 4)).reach(20) == 0 or not first


@pytest.mark.parametrize("length", [18, 19])
@pytest.mark.parametrize("window", [2, 4, 5, 6, 9])
def test_c10_behind_a_part_of_a_block_the_window_shows_less(window: int, length: int) -> None:
    """A row that ended in the middle of a block leaves its last blocks, seen from there and not from the
    block's beginning.
    """
    pool = BlockPool(16, 4)
    table = BlockTable(pool)
    table.append(length)
    table.release_before(length - window + 1)
    tokens = TOKENS[:length]
    commit(table, tokens, keep_tokens=True)
    commit_tail(table, tokens)
    first = table.released
    table.free()
    lookup = PrefixLookup(pool, Prompt([*tokens, 99, 98, 97], 4), kind_of(window))
    assert lookup.reach(length + 2) == length
    match = lookup.take(length)
    assert (match.released, len(match.blocks), len(match.digests)) == (first, 4 - first, 4)
    again = BlockTable(pool)
    adopt(again, match)
    assert (again.length, again.released) == (length, first)
    again.free()
    pool.check()


def test_a_gap_ends_it_where_everything_is_seen() -> None:
    pool = BlockPool(16, 4)
    table = BlockTable(pool)
    table.append(20)
    commit(table, TOKENS, keep_tokens=True)
    pool.uncache(table.blocks[2])
    assert reach(pool, TOKENS) == 8


# ---- detach


def test_c15_a_block_that_holds_more_is_copied() -> None:
    """C14, C15: the reader writes on in a block of its own, and the old one is found as before."""
    pool = BlockPool(16, 4)
    left_behind(pool, TOKENS)
    table, copies = taken(pool, [*TOKENS[:15], 1, 2, 3], 15)
    assert len(copies) == 1
    assert copies[0].target == table.blocks[3]
    assert pool.references(copies[0].source) == 0
    table.append(2)
    assert reach(pool, TOKENS) == 20
    pool.check()


def test_a_tail_that_is_wholly_the_readers_is_gone_on_with() -> None:
    """No copy where nothing would be lost; what is written on is found under its new name."""
    pool = BlockPool(16, 16)
    tail = left_behind(pool, TOKENS)
    table, copies = taken(pool, [*TOKENS, 1, 2, 3], 21)
    assert copies == []
    assert table.append(3) == []
    assert reach(pool, [*TOKENS, 5]) == 16
    commit_tail(table, [*TOKENS, 1, 2, 3])
    assert reach(pool, [*TOKENS, 5]) == 21
    assert tail.blocks == []


def test_two_readers_of_one_tail_each_get_a_copy() -> None:
    """C15: no target is a source, and no source is given up before it was read."""
    pool = BlockPool(4, 16)
    left_behind(pool, TOKENS)
    match = PrefixLookup(pool, Prompt([*TOKENS, 1], 16)).take(21)
    tables = [BlockTable(pool), BlockTable(pool)]
    for table in tables:
        adopt(table, match)
    copies = detach(tables)
    assert {copy.source for copy in copies} == {match.partial.block if match.partial else -1}
    assert len({copy.target for copy in copies} | {copies[0].source}) == 3
    pool.check()


def test_without_room_the_reader_goes_on_in_place() -> None:
    """A copy is worth less than a call: the block is taken over, and its old content is not found any
    more.
    """
    pool = BlockPool(6, 4)
    left_behind(pool, TOKENS)
    table, _ = taken(pool, [*TOKENS[:15], 1], 15)
    other = BlockTable(pool)
    table.free()
    other.append(8)
    again = BlockTable(pool)
    adopt(again, PrefixLookup(pool, Prompt(TOKENS, 4)).take(15))
    assert pool.available == 0
    assert detach([again]) == []
    again.append(1)
    pool.check()
    assert reach(pool, TOKENS) < 16


# ---- names of tails


def test_c22_a_tail_loses_its_name_when_it_is_written_on() -> None:
    """C14, C22: in place, and again under its new content."""
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    table.append(6)
    commit(table, TOKENS[:6], keep_tokens=True)
    commit_tail(table, TOKENS[:6])
    assert reach(pool, TOKENS, 20) == 6
    table.append(1)
    assert reach(pool, TOKENS, 20) == 4
    commit_tail(table, TOKENS[:7])
    assert reach(pool, TOKENS, 20) == 7
    pool.forget()
    table.append(2)
    commit_tail(table, TOKENS[:9])
    assert reach(pool, TOKENS, 20) == 0
    pool.check()


def test_nothing_is_named_twice_or_without_its_beginning() -> None:
    pool = BlockPool(8, 4)
    first, second = BlockTable(pool), BlockTable(pool)
    append([first, second], [6, 6])
    for table in (first, second):
        commit(table, TOKENS[:6], keep_tokens=True)
        commit_tail(table, TOKENS[:6])
    assert (second.blocks[0], second.blocks[1]) == (first.blocks[0], 3)
    unnamed = BlockTable(pool)
    unnamed.append(6)
    commit_tail(unnamed, [9] * 6)  # its first block has no name
    commit_tail(first, TOKENS[:5])  # not all of its tokens
    assert reach(pool, [9] * 6) == 0
    pool.check()


# ---- siblings
