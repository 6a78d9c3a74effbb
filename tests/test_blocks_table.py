"""Tables, copy on write and reordering (contract C1, C2, C6, C10, C13 to C16, C36, C37)."""

import math
import random

import pytest

from hf_paged.blocks import BlockPool, BlockTable, Copy, OutOfBlocks, append, blocks_needed, reorder


class Ledger(BlockPool):
    """A pool that writes down every reference that moves."""

    def __init__(self, total: int, block_size: int) -> None:
        super().__init__(total, block_size)
        self.moves: list[tuple[str, int]] = []

    def take(self, near: int = -1, tenant: str = "") -> int:
        block = super().take(near, tenant)
        self.moves.append(("take", block))
        return block

    def share(self, block: int) -> None:
        self.moves.append(("share", block))
        super().share(block)

    def drop(self, block: int, last_access: int = 0) -> None:
        self.moves.append(("drop", block))
        super().drop(block, last_access)


def filled(pool: BlockPool, tokens: int) -> BlockTable:
    table = BlockTable(pool)
    table.append(tokens)
    return table


def rows_with_tails(pool: BlockPool, groups: int, beams: int, shared: int, tail: int) -> list[BlockTable]:
    """Groups of beams, each over `shared` common blocks and `tail` blocks of its own, the last one not
    full.
    """
    rows = []
    for _ in range(groups):
        first = filled(pool, shared * pool.block_size)
        group = [first, *(first.fork() for _ in range(beams - 1))]
        append(group, [tail * pool.block_size - 1] * beams)
        rows += group
    return rows


def contents(tables: list[BlockTable]) -> list[tuple[list[int], int, int, list[bytes]]]:
    return [(list(table.blocks), table.length, table.released, list(table.digests)) for table in tables]


def state(pool: BlockPool, *tables: BlockTable) -> tuple[object, ...]:
    return (
        pool.free,
        pool.held,
        pool.cached,
        [pool.references(block) for block in range(pool.total)],
        contents([*tables]),
    )


# ---- appending


def test_c1_the_numbers_of_the_paper():
    """C1: 7 tokens at B=4 hold 2 blocks, filled (4, 3); the 8th token takes no block, the 9th takes one."""
    pool = BlockPool(8, 4)
    table = filled(pool, 7)
    assert [table.length - 4 * place if place else 4 for place in range(len(table.blocks))] == [4, 3]
    assert [table.slot(position) for position in range(7)] == [0, 1, 2, 3, 4, 5, 6]
    assert table.append(1) == []
    assert len(table.blocks) == 2
    assert table.append(1) == []
    assert len(table.blocks) == 3
    pool.check()


def test_c2_waste_is_always_less_than_a_block():
    """C1, C2: whatever the steps, a block is taken only when all earlier ones are full."""
    rng = random.Random(2)
    for size in (1, 2, 4, 16):
        pool = BlockPool(400, size)
        table = BlockTable(pool)
        while table.length < 300:
            table.append(rng.randrange(0, 2 * size + 2))
            assert len(table.blocks) == math.ceil(table.length / size)
            assert 0 <= len(table.blocks) * size - table.length < size


def trace(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Prompt and output lengths like ShareGPT's: means 161 and 338, long tails, capped at 1024."""

    def length(mean: int) -> int:
        return min(1024, max(1, round(rng.lognormvariate(math.log(mean) - 0.5, 1.0))))

    return [(length(161), length(338)) for _ in range(count)]


@pytest.mark.parametrize(("size", "bound"), [(16, 0.04), (1, 0.0)])
def test_c2_waste_on_a_trace_like_sharegpt(size, bound):
    """C2: unused / allocated slots over all steps of 32 rows that serve the trace: under 4 % at B=16, 0 at
    B=1.
    """
    requests = trace(random.Random(161338), 160)
    pool = BlockPool(2048 * 32 // size, size)
    running: list[tuple[BlockTable, int]] = []
    used = allocated = 0
    while requests or running:
        while requests and len(running) < 32:
            prompt, output = requests.pop()
            running.append((filled(pool, prompt), prompt + output))
        append([table for table, _ in running], [1] * len(running))
        used += sum(table.length for table, _ in running)
        allocated += pool.held * size
        for table, end in running:
            if table.length >= end:
                table.free()
        running = [(table, end) for table, end in running if table.length]
    waste = 1 - used / allocated
    assert 0 <= waste <= bound
    assert (waste > 0) == (size > 1)


def test_c37_no_slot_is_unused_at_block_size_one():
    """C37: allocated + free = total always, and allocated is the number of tokens."""
    pool = BlockPool(50, 1)
    tables = [BlockTable(pool) for _ in range(4)]
    for step in range(1, 10):
        append(tables, [1, 2, 0, 1])
        assert pool.held == 4 * step == sum(table.length for table in tables)
        assert pool.held + pool.free == pool.total
    tables[1].crop(5)
    assert pool.held == sum(table.length for table in tables)


def test_c37_forks_never_copy_at_block_size_one():
    """C37, C14: a full last block is not written, so there is nothing to copy."""
    pool = BlockPool(10, 1)
    table = filled(pool, 3)
    twin = table.fork()
    assert append([table, twin], [2, 1]) == []
    assert pool.held == 6


def test_blocks_lie_side_by_side_where_they_can():
    """C38: the first block lies at `near`, each later one behind the one before it."""
    pool = BlockPool(12, 2)
    tables = [BlockTable(pool, near=0), BlockTable(pool, near=6)]
    append(tables, [1, 1])
    for _ in range(9):
        append(tables, [1, 1])
    assert [table.blocks for table in tables] == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10]]


def test_a_step_that_does_not_fit_changes_nothing():
    """C14, C15: all tables or none, the copies on write counted in; the message has both numbers."""
    pool = BlockPool(6, 4)
    one, other = filled(pool, 6), filled(pool, 3)
    twin = one.fork()
    before = state(pool, one, other, twin)
    with pytest.raises(
        OutOfBlocks, match="4 blocks of 4 tokens are needed for the next step and 3 of 6 are left"
    ):
        append([one, other, twin], [3, 2, 3])
    assert state(pool, one, other, twin) == before
    with pytest.raises(OutOfBlocks):
        other.append(14)
    assert state(pool, one, other, twin) == before
    assert append([one, other, twin], [2, 2, 2]) == [Copy(1, 3)]
    pool.check()


def test_a_step_that_makes_no_sense_changes_nothing():
    """The same table twice, fewer than no tokens, tables of two pools."""
    pool = BlockPool(6, 4)
    table, other = filled(pool, 3), BlockTable(BlockPool(6, 4))
    before = state(pool, table, other)
    with pytest.raises(ValueError, match="2 rows are only 1 tables"):
        append([table, table], [1, 1])
    with pytest.raises(ValueError, match="cannot append -1 tokens"):
        append([table], [-1])
    with pytest.raises(ValueError, match="tables of one pool"):
        append([table, other], [1, 1])
    with pytest.raises(ValueError, match="zip"):
        append([table], [1, 1])
    assert state(pool, table, other) == before
    assert append([], []) == []
    assert blocks_needed([], []) == 0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_token_for_each_is_what_append_makes_of_it(size):
    """C14: the short way for decoding rows takes, copies and drops the same blocks."""
    one, other = BlockPool(100, size), BlockPool(100, size)
    beams, twins = rows_with_tails(one, 2, 3, 2, 1), rows_with_tails(other, 2, 3, 2, 1)
    rng = random.Random(size)
    for _ in range(12):
        sources = [group * 3 + rng.randrange(3) for group in range(2) for _ in range(3)]
        beams, twins = reorder(beams, sources), reorder(twins, sources)
        now = one.tick()
        assert [copy for table in beams for copy in [table.step(now)] if copy] == append(twins, [1] * 6)
        assert state(one, *beams) == state(other, *twins)
        one.check()


def test_c7_a_step_takes_exactly_what_was_announced():
    """C7: blocks_needed is what append takes, shared tails with and without outsiders included."""
    rng = random.Random(7)
    pool = BlockPool(400, 4)
    for _ in range(200):
        tables = [filled(pool, rng.randrange(1, 14))]
        for _ in range(rng.randrange(1, 6)):
            twin = rng.choice(tables).fork()
            twin.crop(rng.randrange(0, min(3, twin.length)))
            tables.append(twin)
        writing = rng.sample(tables, rng.randrange(1, len(tables) + 1))
        tokens = [rng.randrange(0, 6) for _ in writing]
        need, available = blocks_needed(writing, tokens), pool.available
        append(writing, tokens)
        assert available - pool.available == need
        pool.check()
        for table in tables:
            table.free()
    assert pool.free == pool.total


def test_a_slot_is_where_its_token_is_and_nowhere_else():
    pool = BlockPool(8, 4)
    table = filled(pool, 11)
    table.release_before(5)
    assert [table.slot(position) for position in (4, 7, 8, 10)] == [4, 7, 8, 10]
    for position in (-1, 0, 3, 11):
        with pytest.raises(IndexError, match="this table holds 4 to 10"):
            table.slot(position)


# ---- forks and copies on write


def test_c13_fork_never_allocates_and_cannot_fail():
    """C13: one more reference per block, also when no block is left."""
    pool = Ledger(3, 4)
    table = filled(pool, 11)
    assert pool.available == 0
    pool.moves.clear()
    twins = [table.fork() for _ in range(10)]
    assert pool.moves == [("share", block) for _ in twins for block in table.blocks]
    assert all((twin.blocks, twin.length) == (table.blocks, 11) for twin in twins)
    assert [pool.references(block) for block in table.blocks] == [11, 11, 11]
    pool.check()


def test_c6_two_samples_of_one_prompt():
    """C6: equal tables, every count 2."""
    pool = BlockPool(4, 4)
    table = filled(pool, 7)
    twin = table.fork()
    assert table.blocks == twin.blocks
    assert table.blocks is not twin.blocks
    assert [pool.references(block) for block in table.blocks] == [2, 2]


def test_c14_a_private_last_block_is_written_in_place():
    """C14: count 1, no copy, no block."""
    pool = BlockPool(4, 4)
    table = filled(pool, 6)
    assert table.append(2) == []
    assert table.blocks == [0, 1]


@pytest.mark.parametrize("batch", [True, False])
def test_c14_one_copy_for_two_sharers(batch):
    """C14: the first takes a block and a copy, the second finds itself alone; in one step and in two."""
    pool = BlockPool(8, 4)
    table = filled(pool, 7)
    twin = table.fork()
    copies = append([table, twin], [1, 1]) if batch else table.append(1) + twin.append(1)
    assert copies == [Copy(source=1, target=2)]
    assert (table.blocks, twin.blocks) == ([0, 2], [0, 1])
    assert [pool.references(block) for block in (0, 1, 2)] == [2, 1, 1]
    assert pool.counts["copies"] == 1
    pool.check()


def test_c14_a_table_outside_the_step_keeps_the_old_block():
    """C14: k writers of a block that others keep make k copies; without others k - 1."""
    pool = BlockPool(20, 4)
    table = filled(pool, 5)
    writers = [table.fork() for _ in range(3)]
    assert blocks_needed(writers, [1] * 3) == 3
    assert blocks_needed([table, *writers], [1] * 4) == 3
    copies = append(writers, [1] * 3)
    assert [copy.source for copy in copies] == [1, 1, 1]
    assert (table.blocks, pool.references(1)) == ([0, 1], 1)


def test_c14_full_shared_blocks_are_not_copied():
    """C14: what is written is a new block; the shared one stays shared."""
    pool = BlockPool(8, 4)
    table = filled(pool, 8)
    twin = table.fork()
    assert append([table, twin], [1, 1]) == []
    assert [pool.references(block) for block in table.blocks] == [2, 2, 1]


def test_c14_going_back_into_a_shared_block_copies_it():
    """C14: a fork that is cropped into a block which the other one holds full must not write there."""
    pool = BlockPool(8, 4)
    table = filled(pool, 8)
    twin = table.fork()
    twin.crop(2)
    assert blocks_needed([table, twin], [1, 1]) == 2
    assert append([table, twin], [1, 1]) == [Copy(1, 3)]
    assert (table.blocks, twin.blocks) == ([0, 1, 2], [0, 3])


def test_c15_no_target_is_a_source():
    """C15: so all copies of a step can go in one launch, in any order."""
    rng = random.Random(15)
    pool = BlockPool(120, 4)
    tables = [filled(pool, 6)]
    for _ in range(300):
        if len(tables) < 16:
            tables.append(rng.choice(tables).fork())
        copies = append(tables, [rng.randrange(0, 3) for _ in tables])
        targets = [copy.target for copy in copies]
        assert not {copy.source for copy in copies} & set(targets)
        assert len(set(targets)) == len(targets)
        pool.check()
        while pool.available < 60:
            tables.pop(rng.randrange(len(tables))).free()
        tables = tables or [filled(pool, 6)]


# ---- giving back


def test_crop_gives_back_the_blocks_that_only_the_cropped_tokens_used():
    """C4: and nothing else; a shared block loses one reference."""
    pool = BlockPool(8, 4)
    table = filled(pool, 13)
    twin = table.fork()
    twin.crop(6)
    assert (twin.length, twin.blocks) == (7, [0, 1])
    assert [pool.references(block) for block in range(4)] == [2, 2, 1, 1]
    table.crop(0)
    table.crop(5)
    assert (table.length, table.blocks, pool.held) == (8, [0, 1], 2)
    table.crop(8)
    assert (table.length, table.blocks, pool.held) == (0, [], 2)
    pool.check()


@pytest.mark.parametrize("tokens", [-1, 8])
def test_crop_refuses_what_is_not_there(tokens):
    pool = BlockPool(8, 4)
    table = filled(pool, 7)
    with pytest.raises(ValueError, match=f"cannot take {tokens} tokens from a sequence of 7; give 0 to 7"):
        table.crop(tokens)
    assert (table.length, pool.held) == (7, 2)


def test_freeing_empties_the_table_for_another_use():
    """C4: freeing twice gives nothing back twice; the table can begin anew."""
    pool = BlockPool(8, 4)
    table = filled(pool, 13)
    table.release_before(8)
    table.free()
    table.free()
    assert (table.blocks, table.length, table.released, pool.free) == ([], 0, 0, 8)
    table.append(5)
    assert len(table.blocks) == 2
    pool.check()


@pytest.mark.parametrize("window", [1, 3, 4, 7, 8, 9, 16])
def test_c10_steady_state_of_a_sliding_window(window):
    """C10: at most ceil(W / B) + 1 blocks, whatever the window, and the window itself is always held."""
    pool = BlockPool(64, 4)
    table = filled(pool, 37)
    for _ in range(60):
        table.release_before(table.length - window)
        table.append(1)
        assert len(table.blocks) <= math.ceil(window / 4) + 1
        assert table.slot(table.length - 1 - window) >= 0
        pool.check()
    assert pool.held == len(table.blocks)


def test_c10_only_whole_blocks_behind_the_position_go():
    """C10: the block of the position stays, and so does one that is not full."""
    pool = BlockPool(8, 4)
    table = filled(pool, 14)
    table.release_before(7)
    assert (table.released, table.blocks) == (1, [1, 2, 3])
    table.release_before(3)
    table.release_before(-5)
    assert (table.released, table.blocks) == (1, [1, 2, 3])
    table.release_before(1000)
    assert (table.released, table.blocks) == (3, [3])
    table.append(2)
    table.release_before(1000)
    assert (table.released, table.blocks, pool.held) == (4, [], 0)
    assert table.append(1) == []
    assert (table.end, len(table.blocks)) == (5, 1)
    assert (table.capacity, table.lacks(table.capacity), table.lacks(table.capacity + 1)) == (20, 0, 1)
    pool.check()


def test_c10_there_is_no_way_back_behind_the_window():
    """C10: a rollback into released blocks is an error that says what to do, and changes nothing."""
    pool = BlockPool(8, 4)
    table = filled(pool, 14)
    table.release_before(8)
    with pytest.raises(ValueError, match="cannot go back to 7 tokens: the first 8 were given back"):
        table.crop(7)
    table.crop(6)
    assert (table.length, table.blocks) == (8, [])
    assert table.append(3) == []
    assert table.slot(8) >= 0
    pool.check()


def test_c36_one_cross_table_for_all_beams():
    """C36: forks of the encoder's table cost no block and are never copied, and the last one frees it."""
    pool = BlockPool(8, 16)
    cross = filled(pool, 50)
    beams = [cross, *(cross.fork() for _ in range(3))]
    beams = reorder(beams, [2, 2, 0, 1])
    assert (pool.held, pool.peak_held, pool.counts["copies"]) == (4, 4, 0)
    for beam in beams[:3]:
        beam.free()
    assert pool.held == 4
    beams[3].free()
    assert pool.free == 8


# ---- reordering rows


def expect_reordered(tables: list[BlockTable], sources: list[int]) -> list[BlockTable]:
    """Reorder and compare with what the rows were; rows keep their table objects and the others end empty."""
    pool, before = tables[0].pool, contents(tables)
    after = reorder(tables, sources)
    assert contents(after) == [before[source] for source in sources]
    kept = min(len(tables), len(sources))
    assert all(old is new for old, new in zip(tables[:kept], after[:kept], strict=True))
    assert contents(tables[len(sources) :]) == [([], 0, 0, [])] * max(0, len(tables) - len(sources))
    assert (
        len({id(table.blocks) for table in after})
        == len({id(table.digests) for table in after})
        == len(after)
    )
    pool.check()
    return after


@pytest.mark.parametrize(
    "sources",
    [
        [0, 1, 2, 3],
        [3, 2, 1, 0],
        [1, 1, 1, 1],
        [1, 0, 0, 2],
        [2, 2, 3, 3],
        [1, 2, 3, 3],
        [3, 0, 0, 1],
        [2],
        [],
        [3, 3, 0],
        [0, 0, 1, 1, 2, 2, 3, 3],
    ],
)
def test_c6_rows_become_the_rows_they_were_replaced_by(sources):
    """C6: permutations, choices, fewer rows and more rows."""
    pool = BlockPool(80, 4)
    expect_reordered(rows_with_tails(pool, 2, 2, shared=3, tail=2), sources)


def test_c6_any_sequence_of_reorders_keeps_the_books():
    """C6: rows of other lengths, of other groups and with released blocks among them."""
    rng = random.Random(6)
    pool = BlockPool(900, 4)
    rows = rows_with_tails(pool, 3, 4, shared=4, tail=2)
    for _ in range(250):
        sources = [rng.randrange(len(rows)) for _ in range(rng.choice([len(rows), rng.randrange(1, 16)]))]
        rows = expect_reordered(rows, sources)
        append(rows, [rng.randrange(0, 4) for _ in rows])
        rng.choice(rows).release_before(rng.randrange(0, 20))
        for row in rows:
            if row.length > 40:
                row.crop(rng.randrange(0, row.length - row.released * 4))
        pool.check()
    for row in rows:
        row.free()
    assert pool.free == pool.total


def test_c6_a_permutation_moves_no_reference():
    """C6: every row lives on once, so no count changes."""
    pool = Ledger(2000, 16)
    rows = rows_with_tails(pool, 8, 4, shared=20, tail=3)
    sources = [*range(32)]
    random.Random(0).shuffle(sources)
    pool.moves.clear()
    expect_reordered(rows, sources)
    assert pool.moves == []


def test_c6_a_reorder_touches_only_the_tails():
    """C6: a beam that replaces another of its group adds its own tail and drops the other's, in this
    order.
    """
    pool = Ledger(2000, 16)
    rows = rows_with_tails(pool, 4, 4, shared=50, tail=2)
    tails = [list(row.blocks[50:]) for row in rows]
    pool.moves.clear()
    expect_reordered(
        rows, [0, 1, 1, 3, 7, 6, 5, 5, *range(8, 16)]
    )  # beam 2 ends in the first group, beam 4 in the second
    ended, doubled = tails[2] + tails[4], tails[1] + tails[5]
    assert pool.moves == [("share", block) for block in doubled] + [("drop", block) for block in ended]


@pytest.mark.parametrize(
    "sources", [[0, 0, 2, 3], [3, 3, 1, 0], [1, 2, 3, 3], [2, 2, 2, 2], [0, 0], [1, 1, 1, 1, 0, 0]]
)
def test_c6_all_references_are_added_before_any_is_dropped(sources):
    """C6: nothing that stays in use is free, or up for eviction, in between."""
    pool = Ledger(80, 4)
    rows = rows_with_tails(pool, 1, 4, shared=3, tail=2)
    pool.moves.clear()
    reorder(rows, sources)
    kinds = [kind for kind, _ in pool.moves]
    assert kinds == sorted(kinds, reverse=True)
    assert "take" not in kinds


def test_c16_a_beam_step():
    """C16: blocks that only dropped beams named are free at once; at most one block and one copy per beam
    follow.
    """
    pool = BlockPool(200, 4)
    beams = rows_with_tails(pool, 1, 4, shared=5, tail=2)
    rng = random.Random(16)
    for _ in range(200):
        beams = reorder(beams, [rng.randrange(4) for _ in range(4)])
        assert pool.held == len({block for beam in beams for block in beam.blocks})
        available = pool.available
        copies = append(beams, [1] * 4)
        assert available - pool.available <= 4
        assert len(copies) <= 4
        assert len({copy.target for copy in copies}) == len(copies)
        pool.check()


def test_c20_a_row_takes_its_last_use_along():
    """C20: the blocks of a row that was used late are evicted late, whichever table object names them now."""
    pool = BlockPool(2, 4)
    old, recent = BlockTable(pool), BlockTable(pool)
    old.append(4)
    recent.append(4)
    for number, table in enumerate((old, recent)):
        pool.cache(table.blocks[0], bytes([number]) * 32, 4)
    late = recent.blocks[0]
    rows = reorder([old, recent], [1, 0])
    for row in rows:
        row.free()
    assert pool.take() != late
    assert pool.take() == late


@pytest.mark.parametrize("source", [-1, 4])
def test_a_row_that_does_not_exist_is_an_error_that_changes_nothing(source):
    pool = BlockPool(80, 4)
    rows = rows_with_tails(pool, 1, 4, shared=3, tail=2)
    before = state(pool, *rows)
    with pytest.raises(IndexError, match=f"row {source} does not exist; there are 4 rows"):
        reorder(rows, [0, 0, source])
    assert state(pool, *rows) == before
    assert reorder([], []) == []
