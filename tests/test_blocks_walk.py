"""Random walks over the books with a simulated store: every live position must read back what was computed
for it.

What is stored for a position stands for its keys and values: a hash of all tokens up to it, the extra key and
the weights they were computed with. So a wrong copy, a block written while others read it, a stale hit, a
name that lies: all of them are read back as something else (contract C4, C6, C7, C13 to C15, C17 to C19, C21,
C22, C24).
"""

import random
from dataclasses import dataclass, field

import pytest
from cases import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lookups import match

from hf_paged.blocks import (
    BlockPool,
    BlockTable,
    Copy,
    Match,
    OutOfBlocks,
    adopt,
    append,
    blocks_needed,
    commit,
    extra_key,
    reorder,
)

MOST_ROWS = 16
EXTRAS = [b"", extra_key("adapter", 1)]


@dataclass
class Row:
    """One sequence: its table, and what the table must hold."""

    table: BlockTable
    extra: int
    tokens: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def copy(self, table: BlockTable) -> "Row":
        return Row(table, self.extra, list(self.tokens), list(self.values))


class World:
    """A pool, the store behind it, and several callers with rows of their own."""

    def __init__(self, total: int, size: int, verify: bool, callers: int = 3) -> None:
        self.pool = BlockPool(total, size)
        self.size, self.verify = size, verify
        self.store: dict[int, int] = {}
        self.weights = 0
        self.hits = 0
        self.rows: list[list[Row]] = [[] for _ in range(callers)]
        self.pending: list[tuple[Match, list[int], int]] = []
        self.truth: dict[bytes, list[int]] = {}

    # ---- the model

    def all_rows(self) -> list[Row]:
        return [row for rows in self.rows for row in rows]

    def caller(self, number: int) -> list[Row]:
        return self.rows[number % len(self.rows)]

    def pick(self, number: int) -> Row | None:
        rows = self.all_rows()
        return rows[number % len(rows)] if rows else None

    def computed(self, tokens: list[int], extra: int, before: int = 0) -> list[int]:
        """The values that a forward over `tokens` yields, behind a position that holds `before`."""
        values = []
        for token in tokens:
            before = hash((before, token, extra, self.weights))
            values.append(before)
        return values

    def snapshot(self) -> object:
        counts = [self.pool.references(block) for block in range(self.pool.total)]
        tables = [
            (list(r.table.blocks), r.table.length, r.table.released, list(r.table.digests))
            for r in self.all_rows()
        ]
        named = [(digest, self.pool.names.lookup(digest)) for digest in self.truth]
        return counts, tables, named, self.pool.free, self.pool.held, self.pool.cached

    def execute(self, copies: list[Copy]) -> None:
        """One launch: all sources are read before any target is written; the contract says the order is no
        matter.
        """
        assert not {copy.source for copy in copies} & {copy.target for copy in copies}
        assert len({copy.target for copy in copies}) == len(copies)
        for source, target in copies:
            for slot in range(self.size):
                self.store[target * self.size + slot] = self.store.get(source * self.size + slot, 0)

    def make_room(self, rows: list[Row], counts: list[int]) -> bool:
        """Append in the books and carry out the copies; or nothing at all."""
        tables = [row.table for row in rows]
        before, need, available = self.snapshot(), blocks_needed(tables, counts), self.pool.available
        try:
            copies = append(tables, counts)
        except OutOfBlocks:
            assert need > available
            assert self.snapshot() == before
            return False
        assert available - self.pool.available == need
        self.execute(copies)
        return True

    def write(self, row: Row, tokens: list[int]) -> None:
        values = self.computed(tokens, row.extra, row.values[-1] if row.values else 0)
        for value in values:
            self.store[row.table.slot(len(row.values))] = value
            row.values.append(value)
        row.tokens += tokens

    # ---- the moves

    def start(self, number: int, tokens: list[int], extra: int, named: bool = False) -> None:
        """A new sequence: match, adopt, compute the rest, and name it at once or not."""
        if len(self.all_rows()) >= MOST_ROWS:
            return
        row = Row(BlockTable(self.pool), extra % len(EXTRAS))
        self.take_up(row, match(self.pool, tokens, EXTRAS[row.extra], self.verify), tokens)
        if self.make_room([row], [len(tokens) - row.table.length]):
            self.write(row, tokens[len(row.tokens) :])
            self.caller(number).append(row)
            if named:
                self.name(row)
        else:
            row.table.free()

    def take_up(self, row: Row, found: Match, tokens: list[int]) -> None:
        adopt(row.table, found)
        self.hits += len(found.blocks)
        assert row.table.length <= max(0, len(tokens) - 1)
        row.tokens = list(tokens[: row.table.length])
        row.values = self.computed(row.tokens, row.extra)

    def look(self, tokens: list[int], extra: int) -> None:
        """A match that is adopted later, if it still holds."""
        extra %= len(EXTRAS)
        self.pending = [
            *self.pending[-3:],
            (match(self.pool, tokens, EXTRAS[extra], self.verify), tokens, extra),
        ]

    def adopt_late(self, number: int) -> None:
        if not self.pending or len(self.all_rows()) >= MOST_ROWS:
            return
        found, tokens, extra = self.pending.pop(number % len(self.pending))
        row, before = Row(BlockTable(self.pool), extra), self.snapshot()
        try:
            self.take_up(row, found, tokens)
        except ValueError:
            assert self.snapshot() == before
        else:
            self.caller(number).append(row)

    def step(self, number: int, tokens: list[int]) -> None:
        """A step of one caller: each row gets some tokens."""
        rows = self.caller(number)[: len(tokens)]
        counts = [1 + token % 2 if token else 0 for token in tokens[: len(rows)]]
        if self.make_room(rows, counts):
            for row, count, token in zip(rows, counts, tokens, strict=False):
                self.write(row, [token % 3] * count)

    def grow_one(self, number: int, tokens: list[int]) -> None:
        row = self.pick(number)
        if row and self.make_room([row], [len(tokens)]):
            self.write(row, tokens)

    def fail(self, number: int, count: int) -> None:
        """A forward that wrote rubbish and failed; the caller goes back."""
        rows = self.caller(number)
        if self.make_room(rows, [count] * len(rows)):
            for row in rows:
                for position in range(len(row.values), row.table.length):
                    self.store[row.table.slot(position)] = -1
            for row in rows:
                row.table.crop(count)

    def fork(self, number: int) -> None:
        row = self.pick(number)
        if row and len(self.all_rows()) < MOST_ROWS:
            available = self.pool.available
            self.caller(number).append(row.copy(row.table.fork()))
            assert self.pool.available == available

    def crop(self, number: int, count: int) -> None:
        row = self.pick(number)
        if row is None:
            return
        count = min(count, row.table.length - row.table.released * self.size)
        row.table.crop(count)
        del row.tokens[len(row.tokens) - count :]
        del row.values[len(row.values) - count :]

    def release(self, number: int, window: int) -> None:
        row = self.pick(number)
        if row:
            first = max(row.table.length - window, row.table.released * self.size)
            row.table.release_before(row.table.length - window)
            assert row.table.released == first // self.size

    def reorder(self, number: int, sources: list[int]) -> None:
        place = number % len(self.rows)
        rows = self.rows[place]
        most = MOST_ROWS - len(self.all_rows()) + len(rows)
        sources = [source % len(rows) for source in sources[:most]] if rows else []
        tables = reorder([row.table for row in rows], sources)
        self.rows[place] = [rows[source].copy(table) for source, table in zip(sources, tables, strict=True)]
        assert all(row.table.length == 0 for row in rows[len(sources) :])

    def free(self, number: int) -> None:
        row = self.pick(number)
        if row:
            row.table.free()
            for rows in self.rows:
                rows[:] = [other for other in rows if other is not row]

    def commit(self, number: int) -> None:
        row = self.pick(number)
        if row:
            self.name(row)

    def name(self, row: Row) -> None:
        commit(row.table, row.tokens, EXTRAS[row.extra], self.verify)
        fresh = self.computed(row.tokens, row.extra)
        for index, digest in enumerate(row.table.digests):
            self.truth[digest] = fresh[index * self.size : (index + 1) * self.size]

    def grow(self, more: int) -> None:
        self.pool.grow(self.pool.total + more)

    def update_weights(self) -> None:
        """Later forwards yield other values, and what is cached holds the old ones."""
        self.pool.forget()
        self.weights += 1
        self.truth.clear()

    # ---- what must hold after every move

    def check(self) -> None:
        pool, rows = self.pool, self.all_rows()
        pool.check()
        assert pool.free + pool.held + pool.cached == pool.total
        assert pool.held == len({block for row in rows for block in row.table.blocks})
        for row in rows:
            table = row.table
            assert table.length == len(row.tokens)
            assert len(table.blocks) == -(-len(row.tokens) // self.size) - table.released
            for position in range(table.released * self.size, table.length):
                assert self.store[table.slot(position)] == row.values[position], (table, position)
        for digest, values in list(self.truth.items()):
            block = pool.names.lookup(digest)
            if block is None:
                del self.truth[digest]
            else:
                assert [self.store[block * self.size + slot] for slot in range(self.size)] == values, (
                    f"the name of {block} lies"
                )

    def end(self) -> None:
        """Everything is given back: nothing is held, and what is cached can be taken."""
        for row in self.all_rows():
            row.table.free()
        self.rows = [[] for _ in self.rows]
        self.check()
        assert self.pool.held == 0
        assert self.pool.free + self.pool.cached == self.pool.total == self.pool.available
        whole = BlockTable(self.pool)
        whole.append(self.pool.total * self.size)
        whole.free()
        assert self.pool.free == self.pool.total


numbers = st.integers(0, 60)
some_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=24)
prompts = st.builds(
    lambda length, last: [0] * length + last, st.integers(1, 30), st.lists(st.integers(0, 1), max_size=3)
)


class Walk(RuleBasedStateMachine):
    """Hypothesis chooses the moves, and shortens the walk if one of them breaks the books."""

    @initialize(total=st.integers(1, 40), size=st.sampled_from([1, 2, 4, 8]), verify=st.booleans())
    def begin(self, total: int, size: int, verify: bool) -> None:
        self.world = World(total, size, verify)

    @rule(caller=numbers, tokens=prompts, extra=st.integers(0, 1), named=st.booleans())
    def start(self, caller: int, tokens: list[int], extra: int, named: bool) -> None:
        self.world.start(caller, tokens, extra, named)

    @rule(caller=numbers, tokens=st.lists(st.integers(0, 5), min_size=1, max_size=8))
    def step(self, caller: int, tokens: list[int]) -> None:
        self.world.step(caller, tokens)

    @rule(row=numbers, tokens=some_tokens)
    def grow_one(self, row: int, tokens: list[int]) -> None:
        self.world.grow_one(row, tokens)

    @rule(caller=numbers, count=st.integers(0, 9))
    def fail(self, caller: int, count: int) -> None:
        self.world.fail(caller, count)

    @rule(row=numbers)
    def fork(self, row: int) -> None:
        self.world.fork(row)

    @rule(row=numbers, count=numbers)
    def crop(self, row: int, count: int) -> None:
        self.world.crop(row, count)

    @rule(row=numbers, window=st.integers(0, 20))
    def release(self, row: int, window: int) -> None:
        self.world.release(row, window)

    @rule(caller=numbers, sources=st.lists(numbers, max_size=9))
    def reorder(self, caller: int, sources: list[int]) -> None:
        self.world.reorder(caller, sources)

    @rule(row=numbers)
    def free(self, row: int) -> None:
        self.world.free(row)

    @rule(row=numbers)
    def commit(self, row: int) -> None:
        self.world.commit(row)

    @rule(tokens=prompts, extra=st.integers(0, 1))
    def look(self, tokens: list[int], extra: int) -> None:
        self.world.look(tokens, extra)

    @precondition(lambda self: self.world.pending)
    @rule(number=numbers)
    def adopt_late(self, number: int) -> None:
        self.world.adopt_late(number)

    @precondition(lambda self: self.world.pool.total < 60)
    @rule(more=st.integers(0, 5))
    def grow(self, more: int) -> None:
        self.world.grow(more)

    @rule()
    def update_weights(self) -> None:
        self.world.update_weights()

    @invariant()
    def books_and_store_agree(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


Walk.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=50)
TestWalk = Walk.TestCase


def move(world: World, rng: random.Random) -> None:
    """One random move; beginnings and steps are the most frequent, as in life."""
    number = rng.randrange(1000)
    prompt = [rng.randrange(2)] * rng.randrange(1, 10 + 4 * world.size) + [
        rng.randrange(3) for _ in range(rng.randrange(6))
    ]
    tokens = [rng.randrange(6) for _ in range(rng.randrange(1, 8))]
    moves = [
        (20, lambda: world.start(number, prompt, rng.randrange(2))),
        (40, lambda: world.step(number, tokens)),
        (8, lambda: world.grow_one(number, prompt)),
        (5, lambda: world.fail(number, rng.randrange(9))),
        (14, lambda: world.fork(number)),
        (10, lambda: world.crop(number, rng.randrange(12))),
        (5, lambda: world.release(number, rng.randrange(12))),
        (14, lambda: world.reorder(number, [rng.randrange(9) for _ in range(rng.randrange(9))])),
        (14, lambda: world.free(number)),
        (30, lambda: world.commit(number)),
        (6, lambda: world.look(prompt, rng.randrange(2))),
        (6, lambda: world.adopt_late(number)),
        (1, lambda: world.update_weights()),
    ]
    rng.choices([do for _, do in moves], [weight for weight, _ in moves])[0]()


@pytest.mark.parametrize(
    ("seed", "total", "size"), [(1, 30, 4), (2, 14, 8), (3, 60, 2), (4, 90, 1), (5, 12, 16)]
)
def test_a_long_seeded_walk(seed, total, size):
    """C7 and all the rest: the walk must have met what it is there for."""
    rng = random.Random(seed)
    world = World(total, size, verify=bool(seed % 2))
    for _ in range(examples(900)):
        move(world, rng)
        world.check()
    counts = world.pool.counts
    assert min(world.hits, counts["evictions"]) > 8
    assert counts["copies"] > 8 or size == 1
    assert world.pool.peak_held > total * 0.9
    world.end()
