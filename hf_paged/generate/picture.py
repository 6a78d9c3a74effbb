"""The blocks of a cache as a map, for notebooks."""

from __future__ import annotations

from ..blocks import BlockTable
from ..blocks.pool import CACHED, HELD
from ..kv import Sequences
from ..kv.rows import Rows
from ..trace import BlockMap, Kind, Name, Step, Table

NOTHING = Table(0, ())


def block_map(sequences: Sequences, cross: Sequences | None, block_size: int) -> BlockMap:
    """The tables of a cache's rows as they are, and what else lies in their pools. Nothing is forked for it:
    a row that stands for equal ones is shown as all of them.

    cross: the rows of layers that attend to another sequence.
    """
    parts = [sequences] if cross is None else [sequences, cross]
    kinds, tables, cached, others = [], [], [], []
    with sequences.memory.lock:
        for rows, sources in ((rows, part.sources) for part in parts for rows in part.rows.values()):
            states = rows.group.pool.states()
            tables.append(_tables(rows, sources))
            own = {block for table in tables[-1] for block in table.blocks}
            kinds.append(Kind(rows.kind.name, rows.kind.window, len(states)))
            cached.append(frozenset(block for block, state in enumerate(states) if state == CACHED))
            others.append(frozenset(block for block, state in enumerate(states) if state == HELD) - own)
    count = max(map(len, tables), default=0)
    found = {
        Name(row, 0): tuple(each[row] if row < len(each) else NOTHING for each in tables)
        for row in range(count)
    }
    return BlockMap(Step(0, 0.0), tuple(kinds), found, tuple(cached), block_size, tuple(others))


def _tables(rows: Rows, sources: list[int] | None) -> list[Table]:
    """The table of each row; none after a step that broke off."""
    held: list[BlockTable] = [] if rows.torn else rows.tables
    places = range(len(held)) if sources is None or not held else sources
    return [Table(held[place].released, tuple(held[place].blocks)) for place in places]
