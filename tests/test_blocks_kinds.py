"""Kinds of layers: one object each, bounds that no table exceeds, and blocks that nothing attends to any more."""

from __future__ import annotations

import copy
import pickle
import random

import pytest

from hf_paged.blocks import BlockPool, BlockTable, Cross, Full, LayerKind, Window, append


@pytest.mark.parametrize("kind", [Full(), Window(7), Cross()])
def test_equal_kinds_are_one_object(kind: LayerKind) -> None:
    """Also a copy, and one that has travelled: kinds are keys."""
    again = type(kind)() if kind.window is None else type(kind)(kind.window)
    assert again is kind
    assert copy.deepcopy({kind: 1}) == {kind: 1}
    assert pickle.loads(pickle.dumps(kind)) is kind
    assert Window(7) is not Window(8)


@pytest.mark.parametrize("kind", [Full(), Window(1), Window(5), Window(16), Window(17)])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_no_table_holds_more_than_its_kind_says(kind: LayerKind, size: int) -> None:
    """C10: however it grows; what it keeps begins with the block that the next token reaches."""
    chance = random.Random(size)
    for chunk in (1, 3, 16, 40):
        pool = BlockPool(80, size)
        table = BlockTable(pool)
        most = 0
        while table.length < 60:
            kind.release(table)
            assert table.released == kind.reach(table.length, size)
            append([table], [min(chance.randint(1, chunk), 60 - table.length)])
            most = max(most, len(table.blocks))
            assert len(table.blocks) <= kind.blocks_for(size, table.length, chunk)
        assert most <= kind.blocks_for(size, 60, chunk)
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
    assert not kind.grows
    assert not kind.linear


def test_what_sequences_have_in_common_is_counted_once() -> None:
    """C11."""
    assert Full().blocks_of_group(4, 3, 9, 20, 16) == 2 + 3 * 3
    assert Full().blocks_of_group(4, 3, 9, 9, 16) == 3
    assert Window(4).blocks_of_group(4, 3, 9, 4000, 8) == 3 * 3 + 2
