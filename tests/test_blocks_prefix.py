"""Matching, adopting and naming prefixes (contract C9, C17 to C22, C24, C25)."""

import pytest
from lookups import match

from hf_paged.blocks import (
    ROOT,
    BlockPool,
    BlockTable,
    Copy,
    Match,
    OutOfBlocks,
    adopt,
    append,
    chain,
    commit,
    reorder,
)

PROMPT = list(range(100, 111))  # 11 tokens: two full blocks of four, and three more


def committed(pool: BlockPool, tokens: list[int], extra: bytes = b"", verify: bool = False) -> BlockTable:
    table = BlockTable(pool)
    table.append(len(tokens))
    commit(table, tokens, extra, keep_tokens=verify)
    return table


def adopted(pool: BlockPool, tokens: list[int]) -> BlockTable:
    table = BlockTable(pool)
    adopt(table, match(pool, tokens))
    return table


# ---- finding


def test_c18_a_hit_in_use_gets_one_more_reference():
    """C18: the same blocks, counted once more."""
    pool = BlockPool(8, 4)
    first = committed(pool, PROMPT)
    second = adopted(pool, PROMPT)
    assert (second.blocks, second.length) == (first.blocks[:2], 8)
    assert second.digests == first.digests
    assert [pool.references(block) for block in first.blocks] == [2, 2, 1]
    pool.check()


def test_c19_a_freed_sequence_is_found_again():
    """C18, C19: from the evictor, taken out of it, still valid."""
    pool = BlockPool(8, 4)
    first = committed(pool, PROMPT)
    blocks = first.blocks[:2]
    first.free()
    assert (pool.free, pool.cached) == (6, 2)
    second = adopted(pool, PROMPT)
    assert second.blocks == blocks
    assert (pool.held, pool.cached) == (2, 0)
    pool.check()


def test_c18_a_prefix_ends_where_the_tokens_do():
    """C18: the chain is followed as far as it is known; a block behind another parent is another block."""
    pool = BlockPool(16, 4)
    first = committed(pool, PROMPT + [1])
    assert match(pool, [*PROMPT[:8], 1, 2, 3, 4, 5]).blocks == first.blocks[:2]
    assert match(pool, [*PROMPT[:4], 9, *PROMPT[5:]]).blocks == first.blocks[:1]
    assert match(pool, [0, *PROMPT]).blocks == []
    assert match(pool, PROMPT[4:]).blocks == []


def test_c18_a_prefix_whose_middle_was_evicted_ends_before_it():
    """C18: what lies behind a gap is not found."""
    pool = BlockPool(8, 4)
    table = committed(pool, PROMPT + [1, 2])
    pool.uncache(table.blocks[1])
    assert match(pool, PROMPT + [1, 2]).blocks == table.blocks[:1]


@pytest.mark.parametrize(
    ("length", "hits"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (11, 2), (12, 2), (13, 3), (14, 3)]
)
def test_c21_at_least_one_token_is_always_computed(length, hits):
    """C21: hits are capped at (L - 1) // B blocks."""
    pool = BlockPool(8, 4)
    tokens = list(range(14))
    committed(pool, tokens)
    assert len(match(pool, tokens[:length]).blocks) == hits


def test_c21_at_block_size_one():
    """C21, C37: all tokens but the last are hits."""
    pool = BlockPool(8, 1)
    table = committed(pool, [5, 6, 7])
    assert match(pool, [5, 6, 7]).blocks == table.blocks[:2]


def test_c9_what_a_hit_takes_from_the_cache_is_not_available_for_the_rest():
    """C9: hits without a reference are the ones to subtract, and what is left is exactly what can be
    taken.
    """
    pool = BlockPool(5, 4)
    held, cached = committed(pool, PROMPT[:4]), committed(pool, PROMPT)
    cached.append(1)
    cached.free()
    found = match(pool, PROMPT)
    resting = sum(pool.references(block) == 0 for block in found.blocks)
    assert (found.blocks[0], pool.available, resting) == (held.blocks[0], 4, 1)
    table = BlockTable(pool)
    adopt(table, found)
    assert pool.available == 3
    with pytest.raises(OutOfBlocks):
        append([table], [13])
    append([table], [12])
    pool.check()


# ---- adopting


def test_only_an_empty_table_can_begin_with_a_prefix():
    pool = BlockPool(8, 4)
    table = committed(pool, PROMPT)
    with pytest.raises(ValueError, match="this one holds 11 tokens"):
        adopt(table, match(pool, PROMPT))
    pool.check()


@pytest.mark.parametrize("event", ["evicted", "rewritten", "forgotten"])
def test_c22_a_match_that_grew_stale_is_refused(event):
    """C22, C24: a match holds nothing; what another caller did since must not hand out wrong keys and
    values.
    """
    pool = BlockPool(3, 4)
    table = committed(pool, PROMPT[:9])
    found = match(pool, PROMPT)
    assert len(found.blocks) == 2
    if event == "rewritten":
        table.crop(2)
        table.append(1)
    else:
        table.free()
        if event == "evicted":
            BlockTable(pool).append(5)
        else:
            pool.forget()
    late = BlockTable(pool)
    held = pool.held
    with pytest.raises(ValueError, match="no longer holds what was matched; match again"):
        adopt(late, found)
    assert (late.blocks, late.length, late.digests, pool.held) == ([], 0, [], held)


def test_c20_adopting_is_an_access():
    """C20: a hit that is given up without a token computed was still used."""
    pool = BlockPool(4, 4)
    waiting = BlockTable(pool)
    one, other = committed(pool, [1, 1, 1, 1]), committed(pool, [2, 2, 2, 2])
    blocks = [one.blocks[0], other.blocks[0]]
    one.free()
    other.free()
    adopt(waiting, match(pool, [1, 1, 1, 1, 1]))
    waiting.free()
    BlockTable(pool).append(12)
    assert pool.names.lookup(chain(ROOT, [1, 1, 1, 1])) == blocks[0]
    assert pool.names.lookup(chain(ROOT, [2, 2, 2, 2])) is None


# ---- the order of eviction


def test_c20_an_old_sequence_that_is_freed_late_goes_first():
    """C20: free the recent one first, the old one after it; the old one's blocks still go first, the deepest
    of them before.
    """
    pool = BlockPool(4, 4)
    old, recent = committed(pool, list(range(8))), committed(pool, list(range(50, 58)))
    old_blocks, recent_blocks = list(old.blocks), list(recent.blocks)
    recent.free()
    old.free()
    assert [pool.take() for _ in range(4)] == [
        old_blocks[1],
        old_blocks[0],
        recent_blocks[1],
        recent_blocks[0],
    ]


def test_c20_rows_of_one_step_are_equally_recent():
    """C20: the deepest block of all rows goes first, not all of one row before any of the next."""
    pool = BlockPool(5, 4)
    long, short = BlockTable(pool), BlockTable(pool)
    append([long, short], [12, 8])
    commit(long, list(range(12)))
    commit(short, list(range(50, 58)))
    blocks = [long.blocks[2], {long.blocks[1], short.blocks[1]}, {long.blocks[0], short.blocks[0]}]
    long.free()
    short.free()
    taken = [pool.take() for _ in range(5)]
    assert [taken[0], {*taken[1:3]}, {*taken[3:]}] == blocks


def test_c20_a_common_prefix_is_as_recent_as_its_last_reader():
    """C20: whoever frees last does not make it old again."""
    pool = BlockPool(5, 4)
    first = committed(pool, PROMPT[:8])
    other = committed(pool, [7, 7, 7, 7])
    second = adopted(pool, PROMPT)
    second.append(1)
    second.free()
    other.free()
    shared = first.blocks[0]
    first.free()
    while pool.names.lookup(chain(ROOT, PROMPT[:4])) == shared:
        taken = pool.take()
    assert (taken, pool.available) == (shared, 0)


# ---- naming


def test_c22_what_was_not_committed_is_not_found():
    """C22: neither while it is held nor after it is freed; so a failed forward poisons nothing."""
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    table.append(11)
    assert match(pool, PROMPT).blocks == []
    table.free()
    assert (match(pool, PROMPT).blocks, pool.cached) == ([], 0)


def test_c22_only_full_blocks_of_known_tokens_are_named():
    """C17, C22: a block is named once its tokens are known on the host, and not before it is full."""
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    table.append(11)
    commit(table, PROMPT[:7])
    assert len(table.digests) == 1
    commit(table, PROMPT + [1, 2, 3])
    assert len(table.digests) == 2
    table.append(1)
    commit(table, PROMPT + [1])
    assert len(table.digests) == 3
    assert table.digests[2] == chain(chain(chain(ROOT, PROMPT[:4]), PROMPT[4:8]), [*PROMPT[8:], 1])


def test_c22_tokens_beyond_those_that_are_there_are_not_looked_at():
    """C22: of a sequence that runs ahead the last tokens are not known; the answer says whether another block
    is named now.
    """
    pool = BlockPool(8, 4)
    first, second = committed(pool, PROMPT), BlockTable(pool)
    second.append(11)
    assert not commit(second, [*PROMPT[:4], -1, -1], until=3)
    assert second.digests == []
    assert commit(second, [*PROMPT[:4], *[-1] * 7], until=7)
    assert (second.digests, second.blocks[0]) == (first.digests[:1], first.blocks[0])
    third = BlockTable(pool)
    third.append(4)
    assert not commit(third, [7, 7, 7, 7], until=4)
    pool.check()


def test_c22_a_cropped_block_that_is_written_again_loses_its_name():
    """C14, C22: written in place, it no longer holds what its name says; until then it does."""
    pool = BlockPool(8, 4)
    tokens = PROMPT[:8]
    table = committed(pool, tokens)
    table.crop(2)
    assert match(pool, [*tokens, 0]).blocks == table.blocks
    assert table.append(2) == []
    assert match(pool, [*tokens, 0]).blocks == table.blocks[:1]
    commit(table, [*tokens[:6], 8, 9])
    assert match(pool, [*tokens[:6], 8, 9, 0]).blocks == table.blocks
    pool.check()


def test_c14_a_cropped_block_that_others_read_is_copied():
    """C14, C21: whoever matched the full block keeps it as it was."""
    pool = BlockPool(8, 4)
    tokens = PROMPT[:8]
    table = committed(pool, tokens)
    table.crop(2)
    reader = adopted(pool, [*tokens, 0])
    old = table.blocks[1]
    assert table.append(2) == [Copy(old, table.blocks[1])]
    assert (reader.blocks[1], pool.references(old)) == (old, 1)
    assert match(pool, [*tokens, 0]).blocks == reader.blocks


def test_c17_a_block_whose_content_is_cached_already_is_exchanged():
    """C17: the table names the cached one and its own is free."""
    pool = BlockPool(8, 4)
    first, second = BlockTable(pool), BlockTable(pool)
    append([first, second], [11, 11])
    commit(first, PROMPT)
    assert pool.held == 6
    commit(second, PROMPT)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert pool.held == 4
    pool.check()


def test_c17_and_so_is_one_whose_content_rests_in_the_cache():
    """C17, C18: the cached block comes back into use."""
    pool = BlockPool(8, 4)
    first, second = BlockTable(pool), BlockTable(pool)
    append([first, second], [8, 8])
    blocks = list(first.blocks)
    commit(first, PROMPT[:8])
    first.free()
    commit(second, PROMPT[:8])
    assert second.blocks == blocks
    assert (pool.held, pool.cached) == (2, 0)
    pool.check()


def test_c17_a_shared_block_is_not_exchanged():
    """C17: only a private block is, since others name this one at its place; what follows is named all the
    same.
    """
    pool = BlockPool(8, 4)
    first, second = BlockTable(pool), BlockTable(pool)
    append([first, second], [8, 8])
    twin = second.fork()
    twin.append(4)
    commit(first, PROMPT[:8])
    commit(twin, [*PROMPT[:8], 1, 2, 3, 4])
    assert twin.blocks[:2] == second.blocks
    found = match(pool, [*PROMPT[:8], 1, 2, 3, 4, 5])
    assert found.blocks == [*first.blocks, twin.blocks[2]]
    pool.check()


def test_c6_rows_that_came_together_again_keep_their_own_beginnings():
    """C6, C17: equal at the end and different before it, with the same content; a reorder counts only what it
    moves.
    """
    pool = BlockPool(12, 4)
    first, second = BlockTable(pool), BlockTable(pool)
    append([first, second], [8, 8])
    twin = second.fork()
    twin.crop(4)
    commit(first, PROMPT[:8])
    commit(second, PROMPT[:8])
    assert first.blocks[0] != second.blocks[0]
    assert first.blocks[1] == second.blocks[1]
    append([first, second], [3, 2])
    reorder([first, second], [0, 0])
    assert (second.length, second.blocks[1:]) == (11, first.blocks[1:])
    pool.check()
    for table in (first, second, twin):
        table.free()
    assert pool.held == 0


def test_c10_blocks_behind_the_window_leave_their_place_in_the_chain():
    """C10, C18: what was released is not named, what follows is named behind it."""
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    table.append(11)
    table.release_before(4)
    commit(table, PROMPT)
    assert match(pool, PROMPT).blocks == []
    whole = committed(pool, PROMPT)
    assert match(pool, PROMPT).blocks == [whole.blocks[0], table.blocks[0]]
    assert whole.blocks[1] == table.blocks[0]
    pool.check()


# ---- what keeps contents apart


def test_c24_other_extras_never_match():
    """C24: adapter, weights, salt; and the two contents are cached side by side."""
    pool = BlockPool(8, 4)
    plain = committed(pool, PROMPT)
    tuned = committed(pool, PROMPT, extra=b"adapter 1")
    assert not set(plain.blocks) & set(tuned.blocks)
    assert match(pool, PROMPT).blocks == plain.blocks[:2]
    assert match(pool, PROMPT, b"adapter 1").blocks == tuned.blocks[:2]
    assert match(pool, PROMPT, b"adapter 2").blocks == []


def test_c24_a_copy_of_a_table_cannot_rename_what_another_has_named():
    """C24: the same keys and values were not computed with both adapters, so the second gets no names, nor
    what follows.
    """
    pool = BlockPool(12, 4)
    table = BlockTable(pool)
    table.append(8)
    twin = table.fork()
    append([table, twin], [4, 4])
    commit(table, [*PROMPT[:8], 1, 1, 1, 1], b"adapter 1")
    commit(twin, [*PROMPT[:8], 2, 2, 2, 2], b"adapter 2")
    assert twin.digests == []
    honest = committed(pool, PROMPT[:8], b"adapter 2")
    assert match(pool, [*PROMPT[:8], 2, 2, 2, 2, 2], b"adapter 2").blocks == honest.blocks
    pool.check()


def test_c24_what_is_computed_from_forgotten_blocks_gets_no_name():
    """C24: a sequence that outlives a change of weights has old keys and values; new ones that rest on them
    are stale too.
    """
    pool = BlockPool(12, 4)
    before = committed(pool, PROMPT[:8])
    twin = before.fork()
    unnamed = BlockTable(pool)
    unnamed.append(8)
    pool.forget()
    for table in (before, twin, unnamed):
        table.append(4)
        commit(table, [*PROMPT[:8], 1, 2, 3, 4])
    moved = reorder([BlockTable(pool), twin], [1, 1])
    commit(moved[0], [*PROMPT[:8], 1, 2, 3, 4])
    fresh = committed(pool, PROMPT[:8])
    assert match(pool, [*PROMPT[:8], 1, 2, 3, 4, 5]).blocks == fresh.blocks
    before.free()
    assert before.append(8) == []
    commit(before, list(range(8)))
    assert match(pool, list(range(9))).blocks == before.blocks
    pool.check()


def test_c25_a_forged_name_is_found_out_by_its_tokens():
    """C25: with verify the tokens are compared on every hit; a block published without any is no hit."""
    pool = BlockPool(8, 4)
    forger = BlockTable(pool)
    forger.append(8)
    pool.cache(forger.blocks[0], chain(ROOT, PROMPT[:4]), 4, (9, 9, 9, 9))
    assert match(pool, PROMPT).blocks == forger.blocks[:1]
    assert match(pool, PROMPT, verify=True) == Match([], [])
    pool.cache(forger.blocks[1], chain(ROOT, [1, 2, 3, 4]), 4)
    assert match(pool, [1, 2, 3, 4, 5], verify=True) == Match([], [])


def test_c25_honest_names_pass_the_comparison():
    """C25: verify costs no hit; tokens may come as a list or a tuple."""
    pool = BlockPool(8, 4)
    table = committed(pool, PROMPT, verify=True)
    assert match(pool, PROMPT, verify=True).blocks == table.blocks[:2]
    assert match(pool, tuple(PROMPT), verify=True).blocks == table.blocks[:2]


def test_c25_a_collision_is_not_adopted_and_names_nothing_behind_it():
    """C25, C17: a private block is not exchanged for other content, and its successors are not found behind
    that.
    """
    pool = BlockPool(12, 4)
    forger = BlockTable(pool)
    forger.append(4)
    pool.cache(forger.blocks[0], chain(ROOT, PROMPT[:4]), 4, (9, 9, 9, 9))
    table = BlockTable(pool)
    table.append(12)
    blocks = list(table.blocks)
    commit(table, [*PROMPT, 0], keep_tokens=True)
    assert (table.blocks, table.digests) == (blocks, [])
    assert match(pool, [9, 9, 9, 9, *PROMPT[4:]], verify=True).blocks == []
    assert pool.names.lookup(chain(chain(ROOT, PROMPT[:4]), PROMPT[4:8])) is None
    pool.check()


def test_c25_a_name_of_another_depth_is_not_adopted():
    """C25, C17: without kept tokens the place in the sequence is compared at least, so no table names a block
    twice.
    """
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    table.append(8)
    pool.cache(table.blocks[1], chain(ROOT, PROMPT[:4]), 8)
    commit(table, PROMPT[:8])
    assert len(set(table.blocks)) == 2
    pool.check()
