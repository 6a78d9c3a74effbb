"""Which rows of a step read the same blocks at the same places: groups, from tables.

A group is a run of equal block ids from the front of its members' tables, wherever that comes from: samples,
beams, hits of the prefix cache, copies of kept caches. Comparing one place would not do: two blocks may hold
the same content under other ids, and so name one block behind them.

The books are a tree of chunks, GRAIN full blocks each. A row is entered when it comes, again when it has
filled a chunk, and taken out when it ends: steps in between ask for the same groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

GRAIN = 8
"""Blocks of a chunk: common parts are as long as some number of chunks."""
LAUNCH = 2100
"""Tokens that a level of groups must leave unread: reading them costs what its launch does."""
STAYS = 0.5
"""The share of that at which a level that is in use stays, so that it does not come and go."""
LEVELS = 2
"""Groups that a row may be in: a system prompt under a prompt with its samples."""
FORKS = 16
"""Forks on one way through the tree. With more of them a row is in one group at most: to find those takes a
time that grows with the rows alone.
"""


class SharedRead(NamedTuple):
    """Blocks from `begin` to `end` of these rows, counted from the first, which are read once for all."""

    rows: tuple[int, ...]
    begin: int
    end: int

    @property
    def unread(self) -> int:
        """Blocks that are not read again."""
        return (len(self.rows) - 1) * (self.end - self.begin)


class _Chunk:
    """A place in the tree: the rows whose tables begin with the chunks on the way to it."""

    __slots__ = ("above", "below", "count", "depth", "ids", "rows")

    def __init__(self, above: _Chunk | None = None, ids: tuple[int, ...] = ()) -> None:
        self.above = above
        self.ids = ids
        self.depth: int = 0 if above is None else above.depth + 1
        self.below: dict[tuple[int, ...], _Chunk] = {}
        self.count = 0
        """The rows that pass here or end here."""
        self.rows: set[int] = set()
        """Those that end here."""

    def members(self) -> Iterator[int]:
        """The rows that pass here or end here."""
        waiting = [self]
        while waiting:
            chunk = waiting.pop()
            yield from chunk.rows
            waiting += chunk.below.values()

    def fork(self) -> _Chunk:
        """The last chunk from here on that all rows of this one have."""
        chunk = self
        while len(chunk.below) == 1 and not chunk.rows:
            (chunk,) = chunk.below.values()
        return chunk


class _Choice(NamedTuple):
    """Groups at and below a chunk, and the chunks of tables that they leave unread."""

    unread: int = 0
    groups: tuple[tuple[_Chunk, int], ...] = ()
    """The last chunk of each, and the depth at which its common part begins."""
    forks: int = 0
    """The most of them on one way, whether or not they are groups."""

    def beside(self, other: _Choice) -> _Choice:
        """The groups of both."""
        return _Choice(self.unread + other.unread, self.groups + other.groups, max(self.forks, other.forks))


class SharedReads:
    """The books: rows by the chunks of their tables, and the groups that are worth a launch."""

    def __init__(self, block_size: int) -> None:
        self._root = _Chunk()
        self._ends: dict[int, _Chunk] = {}
        """The last chunk of each row."""
        self._levels = 0
        """Levels of groups in use."""
        self._least = LAUNCH / (block_size * GRAIN)
        self._known: tuple[SharedRead, ...] | None = ()
        """The groups, until a row comes or ends."""

    def enter(self, row: int, blocks: Sequence[int]) -> None:
        """Enter the full blocks of a row, or those that it has filled since behind those that it had."""
        chunk = self._ends.get(row, self._root)
        chunk.rows.discard(row)
        chunk.count += row not in self._ends
        for begin in range(chunk.depth * GRAIN, len(blocks) - GRAIN + 1, GRAIN):
            ids = tuple(blocks[begin : begin + GRAIN])
            if ids not in chunk.below:
                chunk.below[ids] = _Chunk(chunk, ids)
            chunk = chunk.below[ids]
            chunk.count += 1
            if chunk.count > 1:
                self._known = None
        chunk.rows.add(row)
        self._ends[row] = chunk

    def leave(self, row: int) -> None:
        """A row has ended, or its table begins with other blocks from now on."""
        chunk: _Chunk | None = self._ends.pop(row)
        assert chunk is not None
        chunk.rows.discard(row)
        while chunk is not None:
            chunk.count -= 1
            if chunk.count and chunk.above is not None:
                self._known = None
            if not chunk.count and chunk.above is not None:
                del chunk.above.below[chunk.ids]
            chunk = chunk.above

    def groups(self) -> tuple[SharedRead, ...]:
        """The groups that leave most unread, a row in LEVELS of them at most; none that save less than their
        launch costs. Those of a row follow one another from its first block on.
        """
        if self._known is None:
            choices = [_Choice(), _best(self._root, 0, 1)]
            if choices[1].forks <= FORKS:
                choices += [_best(self._root, 0, levels) for levels in range(2, LEVELS + 1)]
            levels = 0
            for more in range(1, min(LEVELS + 1, len(choices))):
                least = self._least * (STAYS if more <= self._levels else 1)
                if choices[more].unread - choices[levels].unread >= least * (more - levels):
                    levels = more
            self._levels = levels
            self._known = tuple(
                SharedRead(tuple(sorted(chunk.members())), begin * GRAIN, chunk.depth * GRAIN)
                for chunk, begin in choices[levels].groups
            )
        return self._known


def _best(chunk: _Chunk, begin: int, levels: int) -> _Choice:
    """The groups of the rows below a chunk that leave most unread; those above end at depth `begin`."""
    if not levels:
        return _Choice()
    found = _Choice()
    for below in chunk.below.values():
        if below.count > 1:
            last = below.fork()
            apart = _best(last, begin, levels)
            unread = (last.count - 1) * (last.depth - begin)
            together = _Choice(unread, ((last, begin),)).beside(_best(last, last.depth, levels - 1))
            best = together if together.unread >= apart.unread else apart
            found = found.beside(best._replace(forks=apart.forks + 1))
    return found
