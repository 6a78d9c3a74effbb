"""Columns on the device, and with the rows of a cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from static_batches import CPU, make_group, sequences

from hf_paged.blocks import NO_NUMBERS, Column
from hf_paged.blocks.columns import declared
from hf_paged.kv.columns import StaticColumns

COLUMNS = [Column("mark", per="token"), Column("place", "int64", empty=-1)]


@pytest.fixture(autouse=True)
def _columns() -> Iterator[None]:
    with declared(COLUMNS[0]), declared(COLUMNS[1]):
        yield


def test_entries_beyond_a_step_are_empty() -> None:
    """A row that is not there names no place, after any earlier load."""
    columns = StaticColumns(COLUMNS, 3, 5, CPU)
    mark, place = columns.tensors["mark"], columns.tensors["place"]
    assert (mark.tolist(), place.tolist()) == ([0] * 5, [-1] * 3)
    assert (mark.dtype, place.dtype) == (torch.int32, torch.int64)
    columns.load({"mark": (1, 2, 3, 4), "place": (7, 8, 9)})
    columns.load({"mark": (5,), "place": (6, 5)})
    assert (mark.tolist(), place.tolist()) == ([5, 0, 0, 0, 0], [6, 5, -1])
    columns.load(NO_NUMBERS)
    assert (mark.tolist(), place.tolist()) == ([0] * 5, [-1] * 3)


def test_numbers_that_are_the_same_are_not_copied_again() -> None:
    columns = StaticColumns(COLUMNS, 3, 3, CPU)
    marks = (1, 2)
    columns.load({"mark": marks})
    columns.tensors["mark"].fill_(9)
    columns.load({"mark": marks, "place": (1,)})
    assert columns.tensors["mark"].tolist() == [9, 9, 9]
    assert columns.tensors["place"].tolist() == [1, -1, -1]


def test_a_load_that_broke_off_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = StaticColumns(COLUMNS, 3, 3, CPU)
    numbers = {"mark": (1, 2, 3)}
    columns.load(numbers)

    def breaks(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_paged.kv.columns.upload", breaks)
        with pytest.raises(KeyboardInterrupt):
            columns.load({"mark": (4,)})
    assert columns.loaded is None
    columns.tensors["mark"].fill_(9)
    columns.load(numbers)
    assert columns.tensors["mark"].tolist() == [1, 2, 3]


def test_a_step_of_before_a_declaration() -> None:
    with pytest.raises(RuntimeError, match=r"captured before the columns \['place'\] were declared"):
        StaticColumns(COLUMNS[:1], 3, 3, CPU).load({"place": (1,)})


def test_numbers_move_with_the_rows_of_a_cache() -> None:
    group = make_group()
    cache = sequences(group)
    group.memory.row_fillers.fill("mark", lambda rows: [10 + row for row in rows])
    cache.extend(group.kind, 3, 2)
    cache.fill(3)
    cache.put("place", (0, 1, 2))
    mark = cache.column("mark", CPU)
    assert mark is not None
    assert mark.tolist() == [10, 11, 12]
    assert cache.column("mark", CPU) is mark
    twin = cache.fork()
    cache.select([2, 2, 0])
    assert cache.numbers == {"mark": (12, 12, 10), "place": (2, 2, 0)}
    assert twin.numbers == {"mark": (10, 11, 12), "place": (0, 1, 2)}
    cache.reorder(torch.tensor([2]))
    found = cache.column("place", CPU)
    assert found is not None
    assert found.tolist() == [0]
    cache.put("place", (-1,))
    assert cache.column("place", CPU) is None
    twin.free()
    cache.free()
    assert cache.numbers is twin.numbers is NO_NUMBERS
    group.pool.check()
