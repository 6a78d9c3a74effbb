"""Rows of one cache with a length each: random walks beside a list of tokens for every row (C4, C6, C7)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from read_groups import as_groups
from static_batches import (
    CPU,
    MOST_COLUMNS,
    contents,
    make_group,
    rows_of,
    sequences,
    static_batch,
    write,
)

from hf_paged.blocks import SharedReads
from hf_paged.kv import Batch, Sequences
from hf_paged.kv.rows import Rows


@dataclass
class Walk:
    """A cache, and the numbers that each of its rows should hold."""

    seed: int
    tokens: int = 0
    held: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.window = self.chance.choice([None, None, 3, 6])
        self.block_size = self.chance.choice([1, 2, 4, 16])
        self.group = make_group(self.window, block_size=self.block_size)
        self.cache = sequences(self.group, self.chance.choice([0, 20]), keep_past=self.chance.random() < 0.3)
        shared = SharedReads.of(self.group.kind, self.block_size, "always")
        self.static = static_batch(5, 1, self.block_size, shared=shared)

    @property
    def rows(self) -> Rows:
        return rows_of(self.cache)

    def numbers(self, rows: int, new: int) -> torch.Tensor:
        self.tokens += rows * new
        return torch.arange(self.tokens - rows * new, self.tokens).view(rows, new) + 1.0

    def seen(self, row: int, last: int) -> list[float]:
        """The numbers that the token `last` before the row's end sees."""
        past = self.held[row][: len(self.held[row]) - last]
        return past if self.window is None else past[-self.window :]

    def uneven(self) -> None:
        """A step in which every row takes 0 to 4 tokens."""
        rows = len(self.held) or self.chance.randint(1, 4)
        new = self.chance.randint(1, 4)
        counts = [self.chance.randint(0, new) for _ in range(rows)]
        self.held = self.held or [[] for _ in range(rows)]
        numbers = self.numbers(rows, new)
        with self.cache.taking(counts):
            batch = self.cache.extend(self.group.kind, rows, new)
        pages = write(self.group, batch, numbers)
        for row, count in enumerate(counts):
            self.held[row] += numbers[row, new - count :].tolist()
        found = contents(pages, self.window)
        for row, count in enumerate(counts):
            for last in range(count):
                assert found[row][new - 1 - last] == self.seen(row, last)

    def captured(self, steps: int = 2) -> None:
        """Steps of one token for each row, in the static tensors of a captured step."""
        if not self.held or not min(map(len, self.held)) or self.cache.columns >= MOST_COLUMNS:
            return
        static = self.static
        for _ in range(steps):
            numbers = self.numbers(len(self.held), 1)
            self.rows.advance(1, static)
            static.begin(self.group.captured_ops.advance)
            pages = write(self.group, static, numbers)
            for row, number in enumerate(numbers[:, 0].tolist()):
                self.held[row].append(number)
            expected = [[self.seen(row, 0)] for row in range(len(self.held))]
            assert contents(pages, self.window)[: len(self.held)] == expected
            self.check_groups()

    def check_groups(self) -> None:
        """The static tensors have the groups that books find which see these rows first."""
        books = SharedReads.of(self.group.kind, self.block_size, "always")
        if books is not None and self.static.stamp is not None:
            fresh = books.follow_tables(self.rows.tables, self.since_upload())
            groups = self.static.groups_on(CPU)
            assert groups is not None
            rows = range(len(self.held))
            numbers = groups[: len(rows)].reshape(-1).tolist()
            assert as_groups(numbers, rows, self.block_size) == as_groups(fresh, rows, self.block_size)

    def since_upload(self) -> int:
        """Tokens of every row that were not there when the static tensors were loaded."""
        return self.rows.tables[0].length - int(self.static.uploaded.latest["tokens"][0])

    def beams(self) -> None:
        """Steps between which rows become others, with nothing else between."""
        for _ in range(self.chance.randint(2, 5)):
            self.captured(1)
            self.reorder()

    def reorder(self) -> None:
        if self.held:
            sources = [self.chance.randrange(len(self.held)) for _ in range(self.chance.randint(1, 4))]
            self.cache.reorder(torch.tensor(sources))
            self.held = [list(self.held[source]) for source in sources]

    def crop(self) -> None:
        columns = self.chance.randint(0, min(3, self.cache.columns))
        try:
            self.rows.check_past(columns)
        except RuntimeError:
            return  # behind the window, and given back
        self.cache.crop(columns)
        self.held = [row[: max(0, len(row) - columns)] for row in self.held] if self.cache.columns else []

    def roll_back(self) -> None:
        """An uneven step that is taken back as a failed one."""
        columns, starts, held = self.cache.columns, self.cache.starts, [list(row) for row in self.held]
        if columns and self.window is None:
            self.uneven()
            self.rows.return_to(columns, starts)
            self.held = held

    def fork(self) -> None:
        twin: Sequences = self.cache.fork()
        self.cache.free()
        self.cache = twin

    def check(self) -> None:
        self.group.memory.check()
        if self.held:
            assert self.rows.lengths == [table.length for table in self.rows.tables]
            assert self.rows.lengths == list(map(len, self.held))


@pytest.mark.parametrize("seed", range(40))
def test_rows_advance_by_different_numbers_of_tokens(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(30):
        if walk.cache.columns >= MOST_COLUMNS:
            walk.cache.free()
            walk.held = []
        steps = [
            walk.uneven, walk.uneven, walk.captured, walk.beams, walk.reorder, walk.crop, walk.roll_back,
            walk.fork,
        ]  # fmt: skip
        walk.chance.choice(steps)()
        walk.check()
    walk.cache.free()
    assert walk.group.pool.held == 0


@pytest.mark.parametrize("counts", [[1], [0, 4], [-1, 1]])
def test_numbers_of_tokens_that_do_not_fit_change_nothing(counts: list[int]) -> None:
    group = make_group(block_size=4)
    cache = sequences(group)
    cache.extend(group.kind, 2, 5)
    with pytest.raises(ValueError, match=r"2 rows take 0 to 3 tokens each; got counts="):
        rows_of(cache).extend(2, 3, counts)
    assert rows_of(cache).lengths == [5, 5]
    batch: Batch = cache.extend(group.kind, 2, 1)
    assert batch.lengths(CPU).tolist() == [6, 6]
    group.memory.check()
    cache.free()
