"""Columns on the host: what is absent, what moves with rows, and when a filler is asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_paged.blocks import NO_NUMBERS, Column, ColumnFillers
from hf_paged.blocks.columns import by_token, declared, selected, with_numbers


@pytest.fixture(autouse=True)
def _columns() -> Iterator[None]:
    with declared(Column("mark", per="token")), declared(Column("place", empty=-1)):
        yield


def test_a_column_that_is_empty_in_all_rows_is_absent() -> None:
    numbers = with_numbers(NO_NUMBERS, "place", [-1, 4])
    assert numbers == {"place": (-1, 4)}
    assert with_numbers(numbers, "place", [-1, 4]) is numbers
    assert with_numbers(numbers, "mark", [0, 0]) is numbers
    assert with_numbers(numbers, "place", [-1, -1]) is NO_NUMBERS
    assert selected(numbers, [0, 0]) is NO_NUMBERS


def test_numbers_move_with_their_rows() -> None:
    numbers = {"place": (-1, 4, 5), "mark": (1, 2, 0)}
    assert selected(numbers, [2, 2, 0]) == {"place": (5, 5, -1), "mark": (0, 0, 1)}
    assert by_token(numbers, [1, 3, 1]) == {"place": (-1, 4, 5), "mark": (1, 2, 2, 2, 0)}


def test_fillers_are_asked_where_something_has_changed() -> None:
    fillers, asked = ColumnFillers(), []
    marks = {"a": 1, "b": 0, "c": 2}

    def mark(rows: tuple[str, ...]) -> list[int]:
        asked.append("mark")
        return [marks[row] for row in rows]

    def place(rows: tuple[str, ...]) -> list[int]:
        asked.append("place")
        return list(range(len(rows)))

    fillers.fill("mark", mark)  # type: ignore[arg-type]
    fillers.fill("place", place)  # type: ignore[arg-type]
    first = fillers.of(("a", "b"))
    assert first == {"mark": (1, 0), "place": (0, 1)}
    assert fillers.of(tuple("ab")) is first
    assert sorted(asked) == ["mark", "place"]
    fillers.renew("mark")
    assert fillers.of(("a", "b")) is first  # asked, and nothing is new
    marks["b"] = 3
    fillers.renew("mark")
    second = fillers.of(("a", "b"))
    assert second["mark"] == (1, 3)
    assert second["place"] is first["place"]
    assert fillers.of(("c", "b")) == {"mark": (2, 3), "place": (0, 1)}
    fillers.fill("place", None)
    assert fillers.of(("c", "b")) == {"mark": (2, 3)}
    assert asked.count("place") == 2


def test_a_filler_needs_a_declaration() -> None:
    with pytest.raises(ValueError, match="there is no column 'other'"):
        ColumnFillers().fill("other", list)


def test_numbers_have_at_most_32_bits() -> None:
    with declared(Column("narrow")):
        fillers = ColumnFillers()
        fillers.fill("narrow", lambda rows: [2**31 - 1, -(2**31)][: len(rows)])
        assert fillers.of("ab") == {"narrow": (2**31 - 1, -(2**31))}
        fillers.fill("narrow", lambda rows: [0, 2**31])
        with pytest.raises(ValueError, match="column 'narrow' was given 0 to 2147483648"):
            fillers.of("ab")
