"""Random walks over caches whose steps are captured: counted or uploaded, index tensors say what a `Batch`
says (C4, C6, C7, C14).

Two caches live the same life. One takes its steps through `StaticBatch`, the other through `extend`; every
token is a number in a real store, so a wrong slot, a copy that was left out or a length that was not counted
is read back as another number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from static_batches import (
    CPU,
    MOST_COLUMNS,
    Static,
    contents,
    make_group,
    rows_of,
    sequences,
    static_batch,
    write,
)

from hf_paged.kv import Batch, Ops, Pages, Sequences

MOST_ROWS = 6
BUCKETS = (MOST_ROWS, MOST_ROWS + 2)


@dataclass(eq=False)
class Cache:
    """The same cache twice, and what is known of the one whose steps are captured."""

    captured: Sequences
    ordinary: Sequences
    last: Static | None = None
    """Whose tensors hold its step, until somebody changes the rows or has counted tokens entered."""
    room: int = 0
    counted: bool = False

    @property
    def both(self) -> tuple[Sequences, Sequences]:
        return self.captured, self.ordinary

    def read(self) -> None:
        """Note that somebody looked into the tables."""
        self.last, self.counted = None if self.counted else self.last, False

    @property
    def columns(self) -> int:
        return self.ordinary.columns

    @property
    def count(self) -> int:
        return self.ordinary.count


class Walk(RuleBasedStateMachine):
    """Steps, forks, reorders and what else happens to the rows of a cache."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        window=st.sampled_from([None, None, 3, 6]),
        expected=st.sampled_from([0, 20]),
        keep_past=st.booleans(),
    )
    def begin(self, block_size: int, window: int | None, expected: int, keep_past: bool) -> None:
        self.block_size, self.window, self.options = block_size, window, (expected, keep_past)
        self.groups = [make_group(window, block_size=block_size) for _ in range(2)]
        self.statics: dict[tuple[int, int], Static] = {}
        self.caches = [self.make_cache()]
        self.cache = self.caches[0]
        self.tokens = 0

    def make_cache(self) -> Cache:
        return Cache(*(sequences(group, *self.options) for group in self.groups))

    def numbers(self, rows: int, new: int) -> torch.Tensor:
        self.tokens += rows * new
        return torch.arange(self.tokens - rows * new, self.tokens).view(rows, new) + 1.0

    def static(self, new: int, which: int) -> Static:
        if (new, which) not in self.statics:
            self.statics[new, which] = static_batch(BUCKETS[which], new, self.block_size)
        return self.statics[new, which]

    # ---- steps

    @precondition(lambda self: not self.cache.columns)
    @rule(
        rows=st.integers(1, 4),
        columns=st.integers(1, 12),
        padding=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    )
    def prompt(self, rows: int, columns: int, padding: list[int]) -> None:
        for cache in self.cache.both:
            cache.begin_at([min(start, columns) for start in padding[:rows]])
        self.extend(columns, rows)

    @precondition(lambda self: 0 < self.cache.columns < MOST_COLUMNS)
    @rule(new=st.integers(1, 5))
    def extend(self, new: int, rows: int = 0) -> None:
        """An ordinary step of both."""
        numbers = self.numbers(rows or self.cache.count, new)
        for group, cache in zip(self.groups, self.cache.both, strict=True):
            write(group, cache.extend(group.kind, len(numbers), new), numbers)
        self.cache.last = None

    def may_be_captured(self) -> bool:
        """A row that is padding all through is not taken for a step: the forward sees to that."""
        return (
            max(self.cache.ordinary.starts or [0]) <= self.cache.columns < MOST_COLUMNS
            and self.cache.columns > 0
        )

    @precondition(may_be_captured)
    @rule(new=st.integers(1, 4), which=st.integers(0, 1))
    def step(self, new: int, which: int) -> None:
        cache, static, numbers = self.cache, self.static(new, which), self.numbers(self.cache.count, new)
        counted = cache.last is static and static.user is cache and cache.room >= new
        uploads = static.uploads
        rows_of(cache.captured).advance(new, static)
        assert static.uploads - uploads == (not counted), (
            "a step that only counts is not uploaded, any other is"
        )
        batch = cache.ordinary.extend(self.groups[1].kind, cache.count, new)
        write(self.groups[1], batch, numbers)
        cache.room = (
            cache.room - new if counted else min(-table.length % self.block_size for table in batch.tables)
        )
        cache.last, cache.counted, static.user = static, counted, cache
        self.verify(static, batch, numbers)
        if not counted:
            assert [table.released for table in rows_of(cache.captured).tables] == [
                table.released for table in batch.tables
            ]

    @precondition(may_be_captured)
    @rule(new=st.integers(1, 4), which=st.integers(0, 1))
    def stage(self, new: int, which: int) -> None:
        """A step that was taken the ordinary way is taken once more, as for a capture."""
        self.extend(new)
        static = self.static(new, which)
        rows_of(self.cache.captured).stage(new, static)
        static.user = self.cache
        numbers = torch.arange(self.tokens - self.cache.count * new, self.tokens).view(-1, new) + 1.0
        self.verify(static, rows_of(self.cache.ordinary).batch, numbers)

    @precondition(may_be_captured)
    @rule(count=st.integers(2, 6), new=st.integers(1, 2))
    def steps(self, count: int, new: int) -> None:
        for _ in range(count):
            if self.may_be_captured():
                self.step(new, 0)

    def verify(self, static: Static, batch: Batch, numbers: torch.Tensor) -> None:
        """Run the step on the captured side: it writes and sees what the other side's `batch` does."""
        group, run, fillers = self.groups[0], static.step, static.rows - batch.rows
        store, index = self.groups[1].store(0)
        expected = contents(Pages(*store.of_layer[index], batch, Ops()), self.window)
        group.store(0)
        static.begin(group.captured_ops.advance)
        assert static.step is not run
        captured = write(group, static, numbers)
        self.compare(static, batch)
        assert contents(captured, self.window) == expected + [[[]] * batch.new] * fillers

    def compare(self, static: Static, batch: Batch) -> None:
        """Index tensor by index tensor. Behind a window blocks go back at other times, so other ones are
        taken later.
        """
        rows, new, fillers = batch.rows, batch.new, static.rows - batch.rows
        assert int(static.before) == batch.columns - new == rows_of(self.cache.captured).columns - new
        assert static.lengths(CPU).tolist() == batch.lengths(CPU).tolist() + [0] * fillers
        assert static.targets(CPU)[rows * new :].tolist() == [-1] * (new * fillers)
        slots = static.slots(0, CPU)
        for row, table in enumerate(batch.tables):
            targets = static.targets(CPU)[row * new :][:new].tolist()
            assert slots[row, table.length - new :].tolist() == targets + targets[-1:] * (
                slots.shape[1] - table.length
            )
            if self.window is None:
                assert slots[row, : table.length].tolist() == [
                    table.slot(position) for position in range(table.length)
                ]
                assert static.table(CPU)[row, : table.end].tolist() == table.blocks
        if self.window is None:
            assert static.targets(CPU)[: rows * new].tolist() == batch.targets(CPU).tolist()

    # ---- rows come, go and change places

    @precondition(lambda self: self.cache.columns)
    @rule(sources=st.lists(st.integers(0, 11), min_size=1, max_size=MOST_ROWS), steps=st.integers(0, 2))
    def reorder(self, sources: list[int], steps: int) -> None:
        sources = [source % self.cache.count for source in sources]
        if sources == list(range(self.cache.count)):
            self.read_tables()  # as to whether nothing at all counts as a look
        else:
            self.cache.last = None
        for cache in self.cache.both:
            cache.reorder(torch.tensor(sources))
        self.steps(steps, 1)

    @precondition(lambda self: 0 < self.cache.count <= MOST_ROWS // 2)
    @rule(steps=st.integers(0, 2))
    def spread(self, steps: int) -> None:
        for cache in self.cache.both:
            cache.sources = [row for row in range(cache.count) for _ in range(2)]
            cache.hold(range(len(cache.sources)), None)
        self.cache.last = None
        self.steps(steps, 1)

    @precondition(lambda self: self.cache.columns)
    @rule(columns=st.integers(0, 9), steps=st.integers(0, 2))
    def crop(self, columns: int, steps: int) -> None:
        columns = min(columns, self.cache.columns)
        try:
            rows_of(self.cache.ordinary).check_past(columns)
        except RuntimeError:
            return  # behind the window, and given back
        for cache in self.cache.both:
            cache.crop(columns)
        self.cache.last = None
        self.steps(steps, 1)

    @precondition(lambda self: self.cache.columns and len(self.caches) < 3)
    @rule(steps=st.integers(0, 2))
    def fork(self, steps: int) -> None:
        self.caches.append(Cache(*(cache.fork() for cache in self.cache.both)))
        self.cache.last = None
        self.steps(steps, 1)

    @rule(number=st.integers(0, 2))
    def go_on_with(self, number: int) -> None:
        self.cache = self.caches[number % len(self.caches)]

    @precondition(lambda self: len(self.caches) > 1 or self.cache.columns > MOST_COLUMNS // 3)
    @rule()
    def free(self) -> None:
        for cache in self.cache.both:
            cache.free()
        self.cache.last = None
        if len(self.caches) > 1:
            self.caches.remove(self.cache)
            self.cache = self.caches[0]

    @rule()
    def read_tables(self) -> None:
        mine, theirs = (
            cache.tables(group.kind) for group, cache in zip(self.groups, self.cache.both, strict=True)
        )
        assert [table.length for table in mine] == [table.length for table in theirs]
        if self.window is None:
            assert [table.blocks for table in mine] == [table.blocks for table in theirs]
        self.cache.read()

    @invariant()
    def the_books_add_up(self) -> None:
        for group in getattr(self, "groups", ()):
            group.memory.check()

    def teardown(self) -> None:
        if hasattr(self, "caches"):
            for cache in list(self.caches):
                self.cache = cache
                self.free()
            assert [group.pool.held for group in self.groups] == [0, 0]


Walk.TestCase.settings = settings(max_examples=examples(35), stateful_step_count=40)
TestWalk = Walk.TestCase
