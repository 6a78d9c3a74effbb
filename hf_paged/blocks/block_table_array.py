"""Many block tables in one array, ready for one upload."""

from __future__ import annotations

from array import array

from .partial_index import leading
from .table import BlockTable

NARROWEST = 16


class BlockTableArray:
    """A row of `width` block numbers for every table: block j of row i is `ids[i * width + j]`, counted from
    the sequence's first.

    Entries beyond the end of a table hold some existing block. Every change of a table in the array must be
    reported here.
    """

    def __init__(self) -> None:
        self.width = NARROWEST
        self.height = 0
        self.ids = array("i")
        """Replaced by a new array whenever it grows, so that an array in use never changes its size."""
        self.journal: list[tuple[int, int, int]] | None = None
        """Row, first entry and number of entries of every write, for a reader that empties it and knows what
        was there before: entries at its beginning that are as before are left out.
        """
        self.writes = 0
        """How often a row was written down, beside new blocks at its end."""
        self._written = array("q")
        """The number of the last such write of each row."""

    def put(self, row: int, table: BlockTable, first: int = 0) -> None:
        """Write down a table, or what it names from its block `first` on."""
        first = max(first, table.released)
        self.write(row, first, array("i", table.blocks[first - table.released :]))

    def write(self, row: int, first: int, blocks: array[int]) -> None:
        """Write down what a table names from its block `first` on."""
        if row >= self.height or first + len(blocks) > self.width:
            self._fit(row, first + len(blocks))
        begin = row * self.width + first
        if self.journal is not None:
            same = leading(self.ids[begin : begin + len(blocks)], blocks)
            self.journal.append((row, first + same, len(blocks) - same))
        self.ids[begin : begin + len(blocks)] = blocks
        self.writes += 1
        self._written[row] = self.writes

    def add(self, row: int, table: BlockTable) -> None:
        """Write down the last block of a table, which is new."""
        end = table.end
        if row >= self.height or end > self.width:
            self._fit(row, end)
        self.ids[row * self.width + end - 1] = table.blocks[-1]
        if self.journal is not None:
            self.journal.append((row, end - 1, 1))

    def read(self, row: int, first: int, count: int) -> array[int]:
        """Block ids of a row from its block `first` on."""
        begin = row * self.width + first
        return self.ids[begin : begin + count]

    def first(self, row: int, count: int) -> array[int]:
        """The first block ids of a row."""
        return self.read(row, 0, count)

    def rewritten(self, since: int) -> list[int]:
        """Rows that were written down behind that number of writes: they may name other blocks."""
        return [row for row, last in enumerate(self._written) if last > since]

    def matches(self, row: int, table: BlockTable) -> bool:
        """True if a row agrees with its table."""
        begin = row * self.width
        return list(self.ids[begin + table.released : begin + table.end]) == table.blocks

    def _fit(self, row: int, width: int) -> None:
        """Make the array at least so large."""
        wide = max(self.width, 1 << (width - 1).bit_length() if width else 0)
        high = max(self.height, 2 * row, 8)
        ids = array("i", bytes(4 * wide * high))
        for i in range(self.height):
            ids[i * wide : i * wide + self.width] = self.ids[i * self.width : (i + 1) * self.width]
        self.ids = ids
        self._written.extend([0] * (high - len(self._written)))
        self.width = wide
        self.height = high
