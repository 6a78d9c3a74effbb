"""The maker of the batches of running rows, against the tables that it reads."""

from __future__ import annotations

import random

import pytest
from static_batches import CPU, LAYOUT, make_group, rows_in_array

from hf_paged.blocks import BlockPool, BlockTable, Full, LayerKind, State, Window
from hf_paged.kv import GroupBatches, LayerGroup, Memory, StaticBatch, StaticSpans, batches
from hf_paged.kv.batch import PLANS
from hf_paged.kv.config import CacheConfig
from hf_paged.kv.ops_torch import Ops


class WithKernels(Ops):
    """Ops that captured steps take for those of Triton."""

    kernels = object()


def tables_of(lengths: list[int], size: int) -> list[BlockTable]:
    pool = BlockPool(sum(lengths), size)
    tables = [BlockTable(pool) for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        table.append(length)
    return tables


@pytest.mark.parametrize("window", [None, 6])
def test_rows_are_read_as_their_tables_are(window: int | None) -> None:
    """By the flat row, beside each other and alone: blocks from the first that a row's tokens attend to."""
    group = make_group(window, block_size=4)
    chance = random.Random(1)
    tables = tables_of([chance.randrange(9, 60) for _ in range(5)], 4)
    counts = [1, 1, 1, 1, 5]
    arrays = rows_in_array(tables, counts, [3, 0, 2, 7, 5])
    maker = GroupBatches(group)
    flat = maker.flat(*arrays)
    assert flat.counts == counts
    for view, table, count in zip(flat.tables, tables, counts, strict=True):
        start = table.length - count
        first = 0 if window is None else max(0, start - window + 1) // 4
        assert view.released == first == maker.group.kind.reach(start, 4)
        assert view.length == table.length
        assert view.blocks == table.blocks[first:]
    singles = tables[:4]
    beside = maker.beside(*rows_in_array(singles, [1] * 4, [3, 0, 2, 7]))
    assert beside.columns == max(table.length for table in singles)
    assert beside.starts == [beside.columns - table.length for table in singles]
    rows, row_ids, starts, _ = rows_in_array(tables[4:], [5], [5])
    alone = maker.alone(rows, row_ids, starts, tables[4].length, 5)
    assert (alone.columns, alone.new, alone.starts) == (tables[4].length, 5, None)
    assert alone.tables[0].blocks == flat.tables[4].blocks
    slots = [tables[4].slot(place) for place in range(starts[0], tables[4].length)]
    assert alone.written(CPU)[0].tolist() == slots


def test_plans_stay_from_step_to_step_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_PLANS", 2)
    tables = tables_of([5, 6], 4)
    arrays = rows_in_array(tables, [1, 1], [0, 1])
    maker = GroupBatches(make_group(block_size=4))
    plans = maker.flat(*arrays).workspace[PLANS]
    plans |= {1: "a", 2: "b"}
    assert maker.flat(*arrays).workspace[PLANS] == {1: "a", 2: "b"}
    plans[3] = "c"
    assert not maker.flat(*arrays).workspace[PLANS]


def group_of(kind: LayerKind, option: str = "auto") -> LayerGroup:
    return Memory().group(kind, CacheConfig(block_size=4, shared_reads=option), 1, 1.0)


@pytest.mark.parametrize(
    ("kind", "option", "may"),
    [(Full(), "always", True), (Full(), "off", False), (Window(5), "always", False)],
)
def test_only_rows_that_may_read_together_have_groups(kind: LayerKind, option: str, may: bool) -> None:
    """Both in captured steps and operation by operation: several rows of one token, of layers that read all."""
    tables = tables_of([9, 9], 4)
    tables[1].blocks[:2] = tables[0].blocks[:2]
    maker = GroupBatches(group_of(kind, option))
    together = maker.flat(*rows_in_array(tables, [1, 1], [0, 1])).groups_on(CPU)
    assert (together is not None) == may
    if together is not None:
        assert together[0, 1] == 2  # members of the first group
    assert maker.flat(*rows_in_array(tables[:1], [1], [0])).groups_on(CPU) is None
    captured, kernels = GroupBatches(group_of(kind, option), captured=True), WithKernels()
    for rows, new, most, ops in [
        (2, 1, None, kernels), (2, 1, 2, kernels), (1, 1, None, kernels), (2, 3, None, kernels), (2, 1, None, Ops())
    ]:  # fmt: skip
        batch = captured.static(rows, 4, new=new, most=most, device=CPU, ops=ops)
        has = may and rows > 1 and new == 1 and ops is kernels
        assert (batch.groups_on(CPU) is not None) == has
        assert isinstance(batch, StaticSpans) == (most is not None)


def test_static_batches_take_their_sizes_from_the_group() -> None:
    group = make_group(7, block_size=4)
    group.store(0)
    batch = GroupBatches(group, captured=True).static(3, 5)
    assert type(batch) is StaticBatch
    assert (batch.rows, batch.width, batch.block_size, batch.window) == (3, 5, 4, 7)
    assert batch.device == LAYOUT.device
    states = GroupBatches(group_of(State()), captured=True).static(3, 5, device=CPU, ops=Ops())
    assert (states.width, states.table(CPU).shape) == (1, (3, 1))  # one slot for any length
    assert states.block_size == batches.ENDLESS
