"""Groups of rows that read common blocks together, from the numbers that kernels read."""

from __future__ import annotations

from collections.abc import Sequence

from hf_paged.blocks.shared_reads import FIELDS


def as_groups(
    numbers: Sequence[int], rows: Sequence[int], block: int
) -> set[tuple[tuple[int, ...], int, int]]:
    """The groups that numbers of rows say, by the rows: checked against what they say of each row."""
    entries = [numbers[i : i + FIELDS] for i in range(0, len(numbers), FIELDS)]
    members = [place for entry in entries for place in entry[6:]]
    found = set()
    around: dict[int, list[int]] = {row: [] for row in rows}
    for number, (first, count, begin, end, outer, *_) in enumerate(entries, 1):
        if count:
            mine = tuple(rows[place] for place in members[first : first + count])
            found.add((mine, begin // block, end // block))
            for row in mine:
                assert around[row] == ([] if outer == 0 else [outer])
                around[row].append(number)
    for place, row in enumerate(rows):
        assert entries[place][5] == (around[row] or [0])[-1]
    return found
