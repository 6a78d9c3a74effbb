"""Kinds of layers: one object each, bounds that no table exceeds, and blocks that nothing attends to any more."""

from __future__ import annotations

import copy
import pickle
import random
from operator import attrgetter

import pytest

from hf_paged.blocks import (
    NEVER_FULL,
    BlockPool,
    BlockTable,
    Cross,
    Full,
    LayerKind,
    PartialBlockIndex,
    PrefixLookup,
    Prompt,
    State,
    Window,
    adopt,
    append,
    commit,
    detach,
)


@pytest.mark.parametrize("kind", [Full(), Window(7), Cross(), State()])
def test_equal_kinds_are_one_object(kind: LayerKind) -> None:
    """Also a copy, and one that has travelled: kinds are keys."""
    again = type(kind)() if kind.window is None else type(kind)(kind.window)
    assert again is kind
    assert copy.deepcopy({kind: 1}) == {kind: 1}
    assert pickle.loads(pickle.dumps(kind)) is kind
    assert Window(7) is not Window(8)


@pytest.mark.parametrize("kind", [Full(), Window(1), Window(5), Window(16), Window(17), State()])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_no_table_holds_more_than_its_kind_says(kind: LayerKind, size: int) -> None:
    """C10: however it grows; what it keeps begins with the block that the next token reaches."""
    chance = random.Random(size)
    for chunk in (1, 3, 16, 40):
        own = kind.block_size(size)
        pool = BlockPool(80, own)
        table = BlockTable(pool)
        most = 0
        while table.length < 60:
            kind.release(table)
            assert table.released == kind.reach(table.length, own)
            append([table], [min(chance.randint(1, chunk), 60 - table.length)])
            most = max(most, len(table.blocks))
            assert len(table.blocks) <= kind.blocks_for(own, table.length, chunk)
        assert most <= kind.blocks_for(own, 60, chunk)
        table.free()
        pool.check()


@pytest.mark.parametrize("kind", [Full(), Window(5), Window(30)])
def test_a_token_attends_to_what_is_kept(kind: LayerKind) -> None:
    for length in range(50):
        first = length - kind.kept(length)
        assert first // 4 == kind.reach(length, 4)


def test_what_is_attended_to_across_comes_at_once() -> None:
    kind = Cross()
    assert [kind.growth(3, held, 40) for held in (0, 40)] == [40, 0]
    assert Full().growth(3, 0, 40) == 3
    assert [kind.holds(tokens, 40) for tokens in (0, 1, 9)] == [0, 40, 40]
    assert Full().holds(9, 40) == 9
    assert not kind.grows
    assert not kind.linear


def test_groups_have_an_order() -> None:
    """Tables of a sequence's own tokens come first, and what reads pages before what keeps states."""
    kinds = [Cross(), State(), Window(8), Full()]
    assert sorted(kinds, key=attrgetter("order")) == [Window(8), Full(), State(), Cross()]
    assert [kind.label for kind in kinds] == ["cross", "state", "window8", "full"]


def test_what_sequences_have_in_common_is_counted_once() -> None:
    """C11."""
    assert Full().blocks_of_group(4, 3, 9, 20, 16) == 2 + 3 * 3
    assert Full().blocks_of_group(4, 3, 9, 9, 16) == 3
    assert Window(4).blocks_of_group(4, 3, 9, 4000, 8) == 3 * 3 + 2
    assert State().blocks_of_group(NEVER_FULL, 3, 9, 9, 16) == 3
    assert Cross().blocks_of_group(4, 3, 9, 20, 16, source=7) == 2


# ---- a block that is never full


def test_a_named_block_that_is_never_full_is_found_and_continued_in_a_copy() -> None:
    """C14, C18: at exactly the tokens it covers, by the longest of several."""
    tokens = [i % 7 for i in range(60)]
    pool = BlockPool(9, State().block_size(4))
    for count in (5, 23, 24, 41):
        table = BlockTable(pool)
        table.append(count)
        commit(table, tokens)
        assert table.copies_next
        table.free()
    assert pool.cached == 4
    other = [*tokens[:30], 9, 9]
    for most, reached in [(60, 24), (23, 23), (22, 5), (4, 0), (0, 0)]:
        assert PrefixLookup(pool, Prompt(other, 4), State()).reach(most) == reached
    table = BlockTable(pool)
    found = PrefixLookup(pool, Prompt(other, 4), State()).take(24)
    adopt(table, found)
    (copy,) = detach([table])
    assert copy == (found.partial.block, table.blocks[0])
    assert not table.copies_next
    table.append(6)
    assert pool.names.covered(copy.source) == 24
    table.free()
    pool.check()


def test_a_block_that_is_never_full_does_not_go_back() -> None:
    table = BlockTable(BlockPool(2, NEVER_FULL))
    table.append(9)
    with pytest.raises(ValueError, match="cannot go back to 7"):
        table.crop(2)
    table.crop(0)
    table.crop(9)
    table.pool.check()
    assert not table.pool.held


def test_names_of_other_tokens_do_not_hide_a_shorter_one() -> None:
    """Every prefix of a prompt that the index has, against a search through all."""
    chance = random.Random(1)
    for _ in range(300):
        index = PartialBlockIndex()
        held = {tuple(chance.choices((1, 2), k=chance.randint(1, 7))) for _ in range(12)}
        for block, content in enumerate(sorted(held)):
            index.add(b"", content, block)
        wanted = chance.choices((1, 2), k=8)
        lengths = [len(content) for content in held if tuple(wanted[: len(content)]) == content]
        found = index.longest(b"", wanted)
        assert (found[1] if found else 0) == max(lengths, default=0)
        assert found is None or sorted(held)[found[0]] == tuple(wanted[: found[1]])
    assert index.longest(b"x", [1]) is None
