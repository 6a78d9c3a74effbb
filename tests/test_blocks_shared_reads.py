"""Groups of rows whose tables begin with the same blocks: found from tables, kept while rows come and end."""

from __future__ import annotations

from array import array
from collections import defaultdict
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_groups import as_groups

from hf_paged.blocks import BlockTableArray, Full, Window, shared_reads
from hf_paged.blocks.shared_reads import GRAIN, LAUNCH, Read, SharedRead, SharedReads

BLOCK = 16


def chunks(*numbers: int) -> list[int]:
    """Blocks of a table, a chunk of them for each number."""
    return [number * GRAIN + place for number in numbers for place in range(GRAIN)]


def unread(groups: tuple[SharedRead, ...]) -> int:
    return sum(group.unread for group in groups)


def entered(tables: dict[int, list[int]], block: int = BLOCK) -> SharedReads:
    books = SharedReads(block)
    for row, table in tables.items():
        books.enter(row, table)
    return books


def require_true(groups: tuple[SharedRead, ...], tables: dict[int, list[int]]) -> None:
    """Members have the group's blocks from the very front; a row's parts follow one another."""
    parts = defaultdict(list)
    for group in groups:
        first = tables[group.rows[0]][: group.end]
        assert len(first) == group.end
        assert len(group.rows) > 1
        for row in group.rows:
            assert tables[row][: group.end] == first
            parts[row].append((group.begin, group.end))
    for each in parts.values():
        each.sort()
        assert len(each) <= shared_reads.LEVELS
        assert [begin for begin, _ in each] == [0, *(end for _, end in each[:-1])]


def most(tables: dict[int, list[int]]) -> int:
    """The blocks that any choice of groups leaves unread, by trying all of them."""
    nodes = {tuple(table[:end]) for table in tables.values() for end in range(GRAIN, len(table) + 1, GRAIN)}
    shared = [
        node for node in nodes if sum(table[: len(node)] == list(node) for table in tables.values()) > 1
    ]
    best = 0
    for count in range(len(shared) + 1):
        for chosen in combinations(shared, count):
            above = {
                node: [len(other) for other in chosen if other != node and node[: len(other)] == other]
                for node in chosen
            }
            if all(len(each) < shared_reads.LEVELS for each in above.values()):
                saved = 0
                for node, ends in above.items():
                    members = sum(table[: len(node)] == list(node) for table in tables.values())
                    saved += (members - 1) * (len(node) - max(ends, default=0))
                best = max(best, saved)
    return best


def test_samples_under_a_system_prompt_are_two_levels() -> None:
    """Three prompts of two samples each behind 40 chunks that all have; each row has more of its own."""
    system = list(range(40))
    tables = {
        2 * prompt + sample: chunks(
            *system, *range(100 + 50 * prompt, 140 + 50 * prompt), 900 + 2 * prompt + sample
        )
        for prompt, sample in product(range(3), range(2))
    }
    groups = entered(tables).groups()
    require_true(groups, tables)
    assert sorted((group.rows, group.begin, group.end) for group in groups) == [
        ((0, 1), 40 * GRAIN, 80 * GRAIN),
        ((0, 1, 2, 3, 4, 5), 0, 40 * GRAIN),
        ((2, 3), 40 * GRAIN, 80 * GRAIN),
        ((4, 5), 40 * GRAIN, 80 * GRAIN),
    ]


def test_the_same_block_behind_others_is_no_group() -> None:
    """Content that is the same under other ids, and one block behind it that both name."""
    assert entered({0: chunks(1, 9, 9, 9), 1: chunks(2, 9, 9, 9)}).groups() == ()


def test_a_group_saves_more_than_its_launch_costs() -> None:
    """With hysteresis: one that is there stays until it saves half of that."""
    rows = LAUNCH // (BLOCK * GRAIN) + 2
    tables = {row: chunks(1, 10 + row) for row in range(rows)}
    books = entered(tables)
    assert len(books.groups()) == 1
    for row in range(rows // 2 - 2):
        books.leave(row)
        assert len(books.groups()) == 1, row
    for row in range(rows // 2 - 2, rows // 2 + 2):
        books.leave(row)
    assert books.groups() == ()
    for row in range(rows // 2):
        books.enter(row, tables[row])
    assert books.groups() == (), "half of a launch's cost brings no group back"
    for row in range(rows // 2, rows // 2 + 2):
        books.enter(row, tables[row])
    assert len(books.groups()) == 1


def test_steps_that_add_blocks_ask_for_the_same_groups() -> None:
    """Nothing is walked while rows only grow; a row that fills a chunk that another has joins it there."""
    tables = {row: chunks(*range(30), 50 + row) for row in range(4)}
    books = entered(tables)
    before = books.groups()
    tables[0] += chunks(70)
    books.enter(0, tables[0])
    assert books.groups() is before
    tables[4] = tables[0] + chunks(80)
    books.enter(4, tables[4])
    after = books.groups()
    require_true(after, tables)
    assert unread(after) == before[0].unread + 32 * GRAIN - 2 * GRAIN


def test_4096_rows_in_one_group_and_a_row_alone() -> None:
    tables = {row: chunks(1, 2, 100 + row) for row in range(4096)}
    assert entered(tables).groups() == (SharedRead(tuple(range(4096)), 0, 2 * GRAIN),)
    assert entered({7: chunks(*range(100))}).groups() == ()


def test_forks_on_one_way_bound_the_work() -> None:
    """Rows that part one after the other: one group for each, and no search of pairs."""
    tables = {row: chunks(*range(row + 1), 1000 + row) for row in range(shared_reads.FORKS + 9)}
    groups = entered(tables, LAUNCH).groups()
    require_true(groups, tables)
    assert len(groups) == 1
    few = {row: tables[row] for row in range(12)}
    assert len(entered(few, LAUNCH).groups()) == 2


TABLES = st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=4), min_size=1, max_size=5)


@settings(max_examples=60)
@given(TABLES, st.data())
def test_any_tables_in_any_order_have_the_best_groups(paths: list[list[int]], data: st.DataObject) -> None:
    """Rows come whole or chunk by chunk, and some end: what is left is found as if it had come alone."""
    tables = {row: chunks(*path) + [5] * (row % GRAIN) for row, path in enumerate(paths)}
    books = SharedReads(LAUNCH)  # a chunk is worth more than a launch
    for row in data.draw(st.permutations(list(tables))):
        cut = data.draw(st.integers(0, len(tables[row])))
        books.enter(row, tables[row][:cut])
        books.groups()
        books.enter(row, tables[row])
    for row in data.draw(st.lists(st.sampled_from(sorted(tables)), unique=True)):
        books.leave(row)
        del tables[row]
    groups = books.groups()
    require_true(groups, tables)
    assert unread(groups) == most(tables)
    assert unread(entered(tables, LAUNCH).groups()) == unread(groups)


@pytest.mark.parametrize("levels", [1, 3])
def test_levels_are_a_number(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is in as many groups at most."""
    monkeypatch.setattr(shared_reads, "LEVELS", levels)
    tables = {row: chunks(1, 1 + row // 4, 1 + row // 2, 100 + row) for row in range(8)}
    groups = entered(tables, LAUNCH).groups()
    require_true(groups, tables)
    assert unread(groups) == most(tables)


def read_of(tables: dict[int, list[int]]) -> Read:
    return lambda row, count: tables[row][:count]


@settings(max_examples=60)
@given(st.data())
def test_rows_are_followed_step_by_step(data: st.DataObject) -> None:
    """Rows come, go, grow and take other blocks; the numbers are those of books made anew."""
    tables: dict[int, list[int]] = {}
    books = SharedReads(BLOCK, always=True)
    for _ in range(data.draw(st.integers(1, 8))):
        rewritten = set(data.draw(st.lists(st.integers(0, 6), max_size=4)))
        for row in rewritten:
            tables[row] = data.draw(st.lists(st.integers(0, 1), max_size=5))
        for row in data.draw(st.lists(st.sampled_from(sorted(tables)), unique=True)) if tables else ():
            tables[row] = tables[row] + [9 + row]
        rows = [row for row in sorted(tables) if data.draw(st.booleans())]
        lengths = [len(tables[row]) * BLOCK + row for row in rows]
        numbers = books.follow(rows, lengths, read_of(tables), rewritten)
        groups = as_groups(numbers, rows, BLOCK)
        assert groups == {(each.rows, each.begin, each.end) for each in books.groups()}
        require_true(books.groups(), tables)
        fresh = SharedReads(BLOCK, always=True)
        fresh.follow(rows, lengths, read_of(tables), ())
        assert unread(fresh.groups()) >= unread(books.groups())


@settings(max_examples=40)
@given(st.data())
def test_several_books_follow_the_same_tables(data: st.DataObject) -> None:
    """Forwards of one step have books each; a row that is written anew is so for all of them."""
    arrays = [BlockTableArray(), BlockTableArray()]
    named: list[dict[int, list[int]]] = [{}, {}]
    books = [SharedReads(1, always=True) for _ in range(2)]
    for _ in range(data.draw(st.integers(2, 8))):
        which = data.draw(st.integers(0, 1))
        for row in data.draw(st.lists(st.integers(0, 5), max_size=3)):
            named[which][row] = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
            arrays[which].write(row, 0, array("i", named[which][row]))
        each = data.draw(st.sampled_from(books))
        rows = array("i", [row for row in sorted(named[which]) if data.draw(st.booleans())])
        lengths = array("i", [len(named[which][row]) for row in rows])
        each.follow_singles(arrays[which], rows, lengths, array("i", [1] * len(rows)))
        require_true(each.groups(), named[which])


def test_steps_count_what_they_do_not_read_again() -> None:
    tables = {row: chunks(*range(30), 50 + row) for row in range(4)}
    books = SharedReads(BLOCK)
    numbers = books.follow([0, 1, 2, 3], [31 * GRAIN * BLOCK] * 4, read_of(tables), ())
    assert books.follow([0, 1, 2, 3], [31 * GRAIN * BLOCK + 1] * 4, read_of(tables), ()) is numbers
    assert books.unread == 2 * 3 * 30 * GRAIN * BLOCK
    assert SharedReads.of(Full(), BLOCK, "off") is None
    assert SharedReads.of(Window(5), BLOCK, "always") is None
