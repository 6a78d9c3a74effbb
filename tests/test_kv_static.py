"""Captured steps' index tensors, one thing at a time: what is counted, what is uploaded, and who must know
(C7, C10, C11, C14).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from static_batches import (
    CPU,
    Static,
    contents,
    make_group,
    rows_in_array,
    rows_of,
    sequences,
    static_batch,
    step,
    write,
)

from hf_paged import OutOfBlocks
from hf_paged.kv import (
    LayerGroup,
    Rows,
    Sequences,
    reference,
    static,
)  # fmt: skip


def begun(
    rows: int = 2, columns: int = 3, block_size: int = 16, **options: int
) -> tuple[LayerGroup, Sequences]:
    """A cache after its prompt."""
    group = make_group(block_size=block_size, **options)
    cache = sequences(group)
    write(group, cache.extend(group.kind, rows, columns), torch.ones(rows, columns))
    return group, cache


READERS: dict[str, tuple[Callable[[Sequences, Rows], object], list[int]]] = {
    "tables": (lambda cache, rows: rows.tables, [7, 7]),
    "tables of the cache": (lambda cache, rows: cache.tables(rows.group.kind), [7, 7]),
    "batch": (lambda cache, rows: rows.batch, [7, 7]),
    "extend": (lambda cache, rows: rows.extend(2, 20), [27, 27]),
    "advance": (lambda cache, rows: rows.advance(20, static_batch(2, 20, 16)), [27, 27]),
    "stage": (lambda cache, rows: rows.stage(1, static_batch(2, 1, 16)), [7, 7]),
    "reorder": (lambda cache, rows: rows.reorder([1, 0, 0]), [7, 7, 7]),
    "reorder to the same": (lambda cache, rows: rows.reorder([0, 1]), [7, 7]),
    "select": (lambda cache, rows: cache.select([1]), [7]),
    "fork": (lambda cache, rows: rows.fork().free(), [7, 7]),
    "crop": (lambda cache, rows: rows.crop(2), [5, 5]),
    "crop into the prompt": (lambda cache, rows: rows.crop(6), [1, 1]),
    "crop of nothing": (lambda cache, rows: rows.crop(0), [7, 7]),
}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", READERS)
def test_counted_tokens_are_entered_for_readers(name: str, window: int | None) -> None:
    """Three of four steps are only counted; afterwards nobody can tell."""
    read, lengths = READERS[name]
    group = make_group(window)
    cache, static = sequences(group, keep_past=True), static_batch(2, 1, 16)
    cache.extend(group.kind, 2, 3)
    group.store(0)
    for _ in range(4):
        step(group, cache, static)
    assert static.uploads == 1
    assert cache.columns == 7
    read(cache, rows_of(cache))
    assert [table.length for table in rows_of(cache).tables] == lengths
    assert cache.columns == lengths[0]
    group.pool.check()


def test_a_fork_has_the_counted_tokens() -> None:
    group, cache = begun()
    static = static_batch(2, 1, 16)
    for _ in range(4):
        step(group, cache, static)
    twin = cache.fork()
    assert (twin.columns, [table.length for table in twin.tables(group.kind)]) == (7, [7, 7])


def test_a_batch_knows_the_counted_tokens() -> None:
    """One that was made before them refuses to answer, a new one has them."""
    group, cache = begun()
    static = static_batch(2, 1, 16)
    step(group, cache, static)
    before = rows_of(cache).batch
    assert before.lengths(CPU).tolist() == [4, 4]
    step(group, cache, static)
    assert static.uploads == 1
    with pytest.raises(RuntimeError, match="changed since"):
        before.check()
    after = rows_of(cache).batch
    assert (after.columns, after.lengths(CPU).tolist()) == (5, [5, 5])


def test_counting_ends_with_the_shortest_room() -> None:
    """Where the next tokens do not fit into every row's last block, the step is uploaded."""
    group = make_group(block_size=4)
    cache, one, three = sequences(group), static_batch(2, 1, 4), static_batch(2, 3, 4)
    cache.begin_at([0, 3])
    write(group, cache.extend(group.kind, 2, 4), torch.ones(2, 4))  # 4 and 1 tokens
    for columns, uploads in (
        (5, 1),
        (6, 1),
        (7, 1),
        (8, 2),
        (9, 3),
    ):  # blocks end at 8 in the first row, at 7 in the second
        step(group, cache, one)
        assert (cache.columns, one.uploads, one.lengths(CPU).tolist()) == (
            columns,
            uploads,
            [columns, columns - 3],
        )
    step(group, cache, three)
    rows_of(cache).crop(3)
    step(group, cache, one)  # 10 and 7: room for two and for one
    step(group, cache, three)
    assert three.uploads == 2
    step(group, cache, three)
    assert (three.uploads, three.lengths(CPU).tolist()) == (3, [16, 13])


def test_a_fork_ends_the_counting() -> None:
    """C14: what is shared from now on is copied before it is written."""
    group, cache = begun(rows=1)
    static = static_batch(1, 1, 16)
    step(group, cache, static)
    twin = cache.fork()
    step(group, cache, static)
    assert static.uploads == 2
    mine, theirs = cache.tables(group.kind)[0].blocks, twin.tables(group.kind)[0].blocks
    assert mine != theirs
    twin.free()


def test_blocks_behind_a_window_go_back() -> None:
    """C10: in captured steps, too."""
    group, cache = begun(rows=2, columns=3, block_size=2, window=4)
    static = static_batch(2, 1, 2)
    for _ in range(20):
        step(group, cache, static)
        assert group.pool.held <= 2 * 4
    assert static.visible(0, 4, CPU)[:, 0, 0].nonzero()[:, 1].tolist() == [19, 20, 21, 22] * 2


@pytest.mark.parametrize(("window", "new", "size"), [(4, 1, 2), (5, 3, 2), (1, 1, 4), (3, 2, 1)])
def test_nothing_behind_a_window_is_read(window: int, new: int, size: int) -> None:
    """Not even to be masked: what lies there may be another's, or NaN, and no weight of zero makes that
    nothing.
    """
    group, cache = begun(rows=2, columns=3, block_size=size, window=window)
    static = Static(2, new, 40, size, 1, CPU, window)
    for _ in range(8):
        step(group, cache, static)
        own = {
            table.slot(i)
            for table in rows_of(cache).tables
            for i in range(table.released * size, table.length)
        }
        assert set(static.slots(0, CPU).flatten().tolist()) <= own


def test_counted_tokens_go_with_the_rows() -> None:
    """C7: rows that are freed in the middle of a run leave nothing behind, and begin anew."""
    group, cache = begun()
    static = static_batch(2, 1, 16)
    for _ in range(3):
        step(group, cache, static)
    cache.free()
    assert (group.pool.held, cache.columns, cache.count) == (0, 0, 0)
    write(group, cache.extend(group.kind, 3, 2), torch.ones(3, 2))
    step(group, cache, static_batch(4, 1, 16))
    assert [table.length for table in cache.tables(group.kind)] == [3, 3, 3]


def test_nothing_moves() -> None:
    """A graph knows addresses: uploaded or counted, all is said in the same tensors."""
    group, cache = begun(block_size=4)
    static = static_batch(2, 1, 4)

    def places() -> list[int]:
        said = [
            static.before,
            static.table(CPU),
            static.lengths(CPU),
            static.targets(CPU),
            static.tokens,
            *static.copies(2),
        ]
        return [x.data_ptr() for x in [*said, *static.tensors]]

    before = places()
    for _ in range(6):
        step(group, cache, static)
        assert places() == before
    storages = {x.untyped_storage().data_ptr() for x in static.tensors}
    said = (
        static.before,
        static.table(CPU),
        static.lengths(CPU),
        static.targets(CPU),
        static.tokens,
        *static.copies(2),
    )
    assert {x.untyped_storage().data_ptr() for x in said} == storages, (
        "whoever captures is told of every tensor"
    )


def test_the_host_knows_nothing_that_a_replay_would_need() -> None:
    """`begin` alone prepares the tensors of a counted step: the host's books are not asked."""
    group, cache = begun(rows=1, columns=3)
    static = static_batch(1, 2, 16)
    step(group, cache, static)
    for length in (7, 9, 11):
        static.begin(group.captured_ops.advance)
        assert static.visible(0, None, CPU)[0, 0].sum(-1).tolist() == [length - 1, length]
        assert static.lengths(CPU).tolist() == [length]
        assert int(static.before) == length - 2
        assert static.targets(CPU).tolist() == [length - 2, length - 1]
        assert static.visible(0, 3, CPU)[0, 0].nonzero().tolist() == [
            [j, p] for j in (0, 1) for p in range(length + j - 4, length + j - 1)
        ]


def test_buffers_take_turns() -> None:
    """While the device reads one buffer, the host fills the other; it comes back to the first when that was
    read.
    """
    group, cache = begun(block_size=1)
    static = static_batch(2, 1, 1)
    waited: list[int] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            waited.append(self.number)

    filled = []
    for _ in range(5):
        before = [buffer.clone() for buffer in static.uploaded.staging]
        static.uploaded._events = [Event(0), Event(1)]  # type: ignore[list-item]
        step(group, cache, static)
        filled += [
            number
            for number, buffer in enumerate(static.uploaded.staging)
            if not torch.equal(buffer, before[number])
        ]
    assert filled in ([0, 1, 0, 1, 0], [1, 0, 1, 0, 1])
    assert waited == filled


def test_rows_that_left_write_and_see_nothing() -> None:
    """A buffer is filled again and still holds larger steps: what is not there any more is a filler."""
    group, cache = begun(rows=4, columns=9, block_size=2)
    static = static_batch(4, 2, 2)
    for _ in range(2):
        step(group, cache, static)
    cache.select([3])
    for _ in range(2):
        step(group, cache, static)
    assert static.lengths(CPU).tolist() == [17, 0, 0, 0]
    assert static.targets(CPU)[2:].tolist() == [-1] * 6
    slots, tokens = static.written(CPU)
    assert tokens.tolist() == [0, 1] + [0] * 6
    assert slots.tolist() == static.targets(CPU)[:2].tolist() + [static.targets(CPU)[0].item()] * 6
    assert not static.visible(0, None, CPU)[1:].any()


@pytest.mark.parametrize("change", ["another cache", "another batch", "its stamp"])
def test_whose_step_it_is_not_uploads(change: str) -> None:
    """Tensors that another step was loaded into are not counted on."""
    group, cache = begun(columns=3)
    static, other = static_batch(2, 1, 16), static_batch(2, 1, 16)
    for _ in range(3):
        step(group, cache, static)
    assert static.uploads == 1
    if change == "another cache":
        second = sequences(group)
        write(group, second.extend(group.kind, 2, 1), torch.ones(2, 1))
        step(group, second, static)
        assert (static.uploads, static.lengths(CPU).tolist()) == (2, [2, 2])
    elif change == "another batch":
        step(group, cache, other)
        assert (other.uploads, other.lengths(CPU).tolist()) == (1, [7, 7])
    else:
        static.stamp = None
    uploads = static.uploads
    step(group, cache, static)
    assert static.uploads == uploads + 1
    assert static.lengths(CPU).tolist() == [8 if change == "another batch" else 7] * 2
    assert int(static.before) == cache.columns - 1


def test_copies_are_uploaded_with_the_step() -> None:
    """C14: a shared last block is copied before the step writes, once for each row but the last that holds
    it.
    """
    group, cache = begun(rows=1, columns=3, block_size=4)
    cache.select([0, 0, 0])
    (shared,) = {table.blocks[0] for table in cache.tables(group.kind)}
    static = static_batch(4, 1, 4)
    numbers = torch.tensor([[7.0], [8.0], [9.0]])
    rows_of(cache).advance(1, static)
    static.begin(group.captured_ops.advance)
    pages = write(group, static, numbers)
    sources, targets = static.copies(2)
    assert sources.tolist() == [shared] * 2
    assert {*targets.tolist(), shared} == {table.blocks[0] for table in cache.tables(group.kind)}
    assert contents(pages, None) == [[[1, 1, 1, 7]], [[1, 1, 1, 8]], [[1, 1, 1, 9]], [[]]]


def test_no_room_changes_nothing() -> None:
    """C11: a step that a fixed pool cannot hold leaves rows and tensors as they were, and it may be tried
    again.
    """
    group, cache = begun(rows=2, columns=3, block_size=4, num_blocks=3)
    static = static_batch(2, 1, 4)
    step(group, cache, static)
    said, before = [x.clone() for x in static.tensors], (static.uploads, cache.columns, group.pool.held)
    for _ in range(2):
        with pytest.raises(OutOfBlocks, match="2 more blocks"):
            rows_of(cache).advance(1, static)
        assert (static.uploads, cache.columns, group.pool.held) == before
        assert all(torch.equal(x, y) for x, y in zip(said, static.tensors, strict=True))
    cache.select([1])
    step(group, cache, static)
    assert static.lengths(CPU).tolist() == [5, 0]
    group.pool.check()


def test_a_step_that_breaks_off_is_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between the books and the tensors: nobody reads, steps or counts these rows again."""
    group, cache = begun()
    static = static_batch(4, 1, 16)
    cache.select([0, 0, 1])

    def fail(*copies: object) -> None:
        raise RuntimeError("device error")

    monkeypatch.setattr(group, "copy_pairs", fail)
    with pytest.raises(RuntimeError, match="device error"):
        rows_of(cache).advance(1, static)
    for again in (lambda: rows_of(cache).advance(1, static), cache.fork, lambda: cache.tables(group.kind)):
        with pytest.raises(RuntimeError, match="broke off"):
            again()
    cache.free()
    group.memory.check()
    assert group.pool.held == 0


def test_rows_that_broke_are_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where their step would only be counted."""
    group, cache = begun()
    static = static_batch(2, 1, 16)
    step(group, cache, static)

    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_paged.kv.rows.reorder", fail)
    with pytest.raises(KeyboardInterrupt):
        cache.select([1, 0])
    with pytest.raises(RuntimeError, match="broke off"):
        rows_of(cache).advance(1, static)
    assert (static.uploads, cache.columns) == (1, 4)
    cache.free()


def test_an_encoder_stays_as_it_is() -> None:
    """With no new tokens nothing is written and nothing counted; all that was stored is there to be seen."""
    group = make_group(block_size=4)
    cache = sequences(group)
    batch = cache.extend(group.kind, 2, 6)
    numbers = torch.arange(12.0).view(2, 6)
    write(group, batch, numbers)
    static = static_batch(3, 0, 4, columns=6)
    rows_of(cache).stage(0, static)
    for _ in range(2):
        static.begin(group.captured_ops.advance)
        assert static.lengths(CPU).tolist() == [6, 6, 0]
        assert int(static.before) == 6
        assert static.targets(CPU).tolist() == []
        assert static.table(CPU)[:2, :2].tolist() == [table.blocks for table in cache.tables(group.kind)]
    pages = write(group, static, torch.zeros(2, 0))
    assert torch.equal(reference.gather(pages.keys, static, 0)[:2, 0, :, 0], numbers)


def test_made_under_inference_mode() -> None:
    """Trap 13: tensors that live on are written outside it, too."""
    group, cache = begun()
    with torch.inference_mode():
        static = static_batch(2, 1, 16)
    for _ in range(2):
        step(group, cache, static)
    assert static.lengths(CPU).tolist() == [5, 5]


def test_the_tokens_of_a_chunk_as_rows() -> None:
    """Each writes its own slot and sees itself and what is before it; rows of other tables are beside
    them.
    """
    group = make_group(num_blocks=20, block_size=4)
    cache, other = sequences(group), sequences(group)
    write(group, cache.extend(group.kind, 1, 3), torch.tensor([[1.0, 2, 3]]))
    write(group, other.extend(group.kind, 1, 6), torch.tensor([[10.0, 20, 30, 40, 50, 60]]))
    cache.extend(group.kind, 1, 4)
    other.extend(group.kind, 1, 1)
    static = static_batch(8, 1, 4)
    tables = [*cache.tables(group.kind), *other.tables(group.kind)]
    static.load_array(*rows_in_array(tables, [4, 1]))
    static.begin(group.captured_ops.advance)
    pages = write(group, static, torch.tensor([[4.0], [5], [6], [7], [70]]))
    assert static.lengths(CPU).tolist() == [4, 5, 6, 7, 7, 0, 0, 0]
    assert (
        static.targets(CPU).tolist()
        == [tables[0].slot(i) for i in (3, 4, 5, 6)] + [tables[1].slot(6)] + [-1] * 3
    )
    seen = contents(pages, None)[:5]
    assert seen == [*([[*map(float, range(1, n))]] for n in (5, 6, 7, 8)), [[10.0, 20, 30, 40, 50, 60, 70]]]


def test_staging_memory_is_taken_from_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts of one piece, none of them twice; what is larger goes with the batch that has it."""
    zeros = torch.zeros
    made: list[weakref.ref[torch.Tensor]] = []

    def locked(count: int, *, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        found = zeros(count, **options)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(static, "PIECE", 64)
    monkeypatch.setattr(static, "_left", zeros(0, dtype=torch.int32))
    monkeypatch.setattr(torch, "zeros", locked)
    parts = [static.staging(count, torch.device("cuda")) for count in (20, 16, 3, 30, 100)]
    for i, part in enumerate(parts):
        part.fill_(i)
    assert [part.tolist() for part in parts] == [[0] * 20, [1] * 16, [2] * 3, [3] * 30, [4] * 100]
    del parts, part
    first, second, large = (each() for each in made)
    assert first is large is None
    assert second is not None
