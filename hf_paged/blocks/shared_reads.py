"""Rows of a step that read the same blocks at the same places: groups, from tables.

A group is a run of equal block ids from the front of its members' tables, wherever that comes from: samples,
beams, hits of the prefix cache, copies of kept caches. Comparing one place would not do: two blocks may hold
the same content under other ids, and so name one block behind them.

The books are a tree of chunks, GRAIN full blocks each. A row is entered when it comes, again when its table
begins with other blocks, and taken out when it ends: steps in between ask for the same groups.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .block_table_array import BlockTableArray
from .kinds import LayerKind
from .table import BlockTable

Read = Callable[[int, int], Sequence[int]]
"""The first so many blocks of a row."""
GRAIN = 8
"""Blocks of a chunk: common parts are as long as some number of chunks."""
LAUNCH = 2100
"""Tokens that a level of groups must leave unread on a GPU: reading them costs what its launch does."""
SPLIT = 384
"""The same on a CPU: what each row has beside its groups becomes a part of its own."""
FEWEST = 4
"""Rows of a group on a CPU: fewer take longer together than one by one, where the caches hold what they
read.
"""
STAYS = 0.5
"""The share of that at which a level that is in use stays, so that it does not come and go."""
LEVELS = 2
"""Groups that a row may be in: a system prompt under a prompt with its samples."""
FIELDS = 8
"""Numbers of a row's entry."""
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

    def count_up(self) -> None:
        """Count one more row that ends here."""
        chunk: _Chunk | None = self
        while chunk is not None:
            chunk.count += 1
            chunk = chunk.above

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

    def __init__(self, block_size: int, always: bool = False, on_cpu: bool = False) -> None:
        """always: groups however little they save, from one common block on."""
        self._block_size = block_size
        self._fewest = FEWEST if on_cpu and not always else 2
        self._grain = 1 if always else GRAIN
        self._root = _Chunk()
        self._ends: dict[int, _Chunk] = {}
        """The last chunk of each row."""
        self._entered: dict[int, Sequence[int]] = {}
        """The blocks of each row, as it was entered."""
        self._levels = 0
        """Levels of groups in use."""
        self._least = 0 if always else (SPLIT if on_cpu else LAUNCH) / (block_size * GRAIN)
        self._known: tuple[SharedRead, ...] | None = ()
        """The groups, until a row comes or ends."""
        self._laid_out: tuple[tuple[SharedRead, ...], Sequence[int], array[int]] | None = None
        """Groups and rows of a step, and the numbers of these."""
        self._followed: tuple[BlockTableArray | None, int] = (None, 0)
        """The tables of the last step, and how many writes of theirs are known: other books read them too."""
        self.unread = 0
        """Tokens that no step has read again, of those that were followed."""

    @classmethod
    def of(cls, kind: LayerKind, block_size: int, option: str, on_cpu: bool = False) -> SharedReads | None:
        """Books for layers of a kind under an option, where rows may read together."""
        return cls(block_size, option == "always", on_cpu) if option != "off" and kind.reads_all else None

    def follow_singles(
        self, tables: BlockTableArray, row_ids: array[int], starts: array[int], counts: array[int]
    ) -> array[int]:
        """The groups, as `follow` answers them, of a step in which row_ids[i] takes counts[i] tokens after
        starts[i]: of its rows of one token, which come first.
        """
        single = len(counts)
        if counts.count(1) < single:  # all have one in most steps
            single = next(i for i, count in enumerate(counts) if count != 1)
        followed, writes = self._followed
        known = writes if followed is tables else 0  # of other tables none
        self._followed = tables, tables.writes
        rewritten = tables.rewritten(known) if tables.writes != known else ()
        return self.follow(row_ids[:single], starts[:single], tables.first, rewritten)

    def follow(
        self, rows: Sequence[int], lengths: Sequence[int], read: Read, rewritten: Collection[int]
    ) -> array[int]:
        """The groups of these rows as numbers; each row has so many tokens before the step that is to be
        computed. read: a row's first blocks. rewritten: rows whose tables may begin with others than before.

        There are 8 numbers a row, as kernels read them. Rows are counted by their places, groups from 1.
        Entry i has the place of group i's first member, its number of members, its first token, the end of
        its tokens, and the group around it; then the innermost group of row i, and places 2 i and 2 i + 1 of
        the list of members.
        """
        if rewritten or self._known is None or self._laid_out is None or self._laid_out[1] != rows:
            self._enter_all(dict(zip(rows, lengths, strict=True)), read, rewritten)
            groups = self.groups()
            if self._laid_out is None or self._laid_out[0] is not groups or self._laid_out[1] != rows:
                self._laid_out = groups, rows, self._numbers(groups, rows)
        groups, _, numbers = self._laid_out
        self.unread += sum(group.unread for group in groups) * self._block_size
        return numbers

    def follow_tables(
        self, tables: Sequence[BlockTable], new: int, sources: Sequence[int] | None = None
    ) -> array[int]:
        """The groups, as `follow` answers them, of rows that have taken `new` tokens at most. sources: of
        each row the one that began with its blocks in the last step; None if tables may begin with any.
        """
        rows: Sequence[int] = range(len(tables))
        before = [max(0, table.length - new) for table in tables]
        rewritten = rows
        if sources is not None:
            self._reorder(sources)
            chunk = self._grain * self._block_size
            rewritten = [row for row, end in self._ends.items() if before[row] // chunk > end.depth]
        return self.follow(rows, before, lambda row, count: tables[row].blocks[:count], rewritten)

    def _reorder(self, sources: Sequence[int]) -> None:
        """Let row i begin with the blocks that row sources[i] was entered with."""
        ends = [self._ends[source] for source in sources]
        moved = [row for row, end in enumerate(ends) if self._ends.get(row) is not end]
        entered = [self._entered[source] for source in sources]
        for row in moved:  # before any leaves: chunks without rows are gone
            ends[row].count_up()
        for row in self._ends.keys() & moved | self._ends.keys() - range(len(sources)):
            self.leave(row)
        for row in moved:
            ends[row].rows.add(row)
        if moved:
            self._known = None
        self._ends = dict(enumerate(ends))
        self._entered = dict(enumerate(entered))

    def _enter_all(self, lengths: Mapping[int, int], read: Read, rewritten: Collection[int]) -> None:
        """Let these be all rows."""
        for row in self._ends.keys() - lengths.keys():
            self.leave(row)
        known = [row for row in rewritten if row in lengths and row in self._ends]
        for row in lengths.keys() - self._ends.keys():
            self.enter(row, read(row, lengths[row] // self._block_size))
        for row in known:
            blocks = read(row, lengths[row] // self._block_size)
            if not self._begins_with(row, blocks):
                self.leave(row)
            self.enter(row, blocks)

    def _begins_with(self, row: int, blocks: Sequence[int]) -> bool:
        """True if blocks begin with those that a row was entered with."""
        count = self._ends[row].depth * self._grain
        return self._entered[row][:count] == blocks[:count]

    def _numbers(self, groups: Sequence[SharedRead], rows: Sequence[int]) -> array[int]:
        places = {row: place for place, row in enumerate(rows)}
        found = array("i", bytes(4 * FIELDS * len(rows)))
        inner = dict.fromkeys(rows, 0)
        members = 0
        for number, group in enumerate(sorted(groups, key=lambda each: each.begin)):
            entry = number * FIELDS
            end = group.end * self._block_size
            around = inner[group.rows[0]]
            found[entry : entry + 5] = array(
                "i", [members, len(group.rows), group.begin * self._block_size, end, around]
            )
            for row in group.rows:
                inner[row] = number + 1
                found[members // 2 * FIELDS + 6 + members % 2] = places[row]
                members += 1
        for place, row in enumerate(rows):
            found[place * FIELDS + 5] = inner[row]
        return found

    def enter(self, row: int, blocks: Sequence[int]) -> None:
        """Enter the full blocks of a row, or those that it has filled since behind those that it had."""
        chunk = self._ends.get(row, self._root)
        chunk.rows.discard(row)
        chunk.count += row not in self._ends
        grain = self._grain
        for begin in range(chunk.depth * grain, len(blocks) - grain + 1, grain):
            ids = tuple(blocks[begin : begin + grain])
            if ids not in chunk.below:
                chunk.below[ids] = _Chunk(chunk, ids)
            chunk = chunk.below[ids]
            chunk.count += 1
            if chunk.count > 1:
                self._known = None
        chunk.rows.add(row)
        self._ends[row] = chunk
        self._entered[row] = blocks

    def leave(self, row: int) -> None:
        """A row has ended, or its table begins with other blocks from now on."""
        chunk: _Chunk | None = self._ends.pop(row)
        assert chunk is not None
        del self._entered[row]
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
            choices = [_Choice(), _best(self._root, 0, 1, self._fewest)]
            if choices[1].forks <= FORKS:
                choices += [_best(self._root, 0, levels, self._fewest) for levels in range(2, LEVELS + 1)]
            levels = 0
            for more in range(1, min(LEVELS + 1, len(choices))):
                least = self._least * (STAYS if more <= self._levels else 1)
                if choices[more].unread - choices[levels].unread >= least * (more - levels):
                    levels = more
            self._levels = levels
            self._known = tuple(
                SharedRead(tuple(sorted(chunk.members())), begin * self._grain, chunk.depth * self._grain)
                for chunk, begin in choices[levels].groups
            )
        return self._known


def usage(books: Iterable[SharedReads]) -> dict[str, int]:
    """The groups of the last steps, their members, and the tokens that no step has read again."""
    every = list(books)
    groups = [group for each in every for group in each.groups()]
    members = sum(len(group.rows) for group in groups)
    unread = sum(each.unread for each in every)
    return {"groups": len(groups), "members": members, "tokens_unread": unread}


def _best(chunk: _Chunk, begin: int, levels: int, fewest: int) -> _Choice:
    """The groups of at least `fewest` of the rows below a chunk that leave most unread; those above end at
    depth `begin`.
    """
    if not levels:
        return _Choice()
    found = _Choice()
    for below in chunk.below.values():
        if below.count >= fewest:
            last = below.fork()
            apart = _best(last, begin, levels, fewest)
            unread = (last.count - 1) * (last.depth - begin)
            together = _Choice(unread, ((last, begin),)).beside(_best(last, last.depth, levels - 1, fewest))
            best = together if together.unread >= apart.unread else apart
            found = found.beside(best._replace(forks=apart.forks + 1))
    return found
