"""The blocks of one sequence, and what a step of many sequences does to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .pool import NOWHERE, BlockPool, OutOfBlocks, expect


class Copy(NamedTuple):
    """Copy on write: the content of `source` must be in `target` before anything of this step is written."""

    source: int
    target: int


class _TableRow(NamedTuple):
    """The blocks of a table and its progress: all that moves when rows are reordered."""

    blocks: list[int]
    digests: list[bytes]
    length: int
    released: int
    stamp: int
    epoch: int


class TableView:
    """The blocks of one sequence in order of position, to read: token t lives in `blocks[t // B - released]`,
    slot t % B.

    `released` counts the leading blocks that were freed because a sliding window has passed them.
    """

    __slots__ = ("blocks", "length", "pool", "released")

    def __init__(self, pool: BlockPool, blocks: list[int], length: int, released: int = 0) -> None:
        self.pool = pool
        self.blocks = blocks
        self.length = length
        self.released = released

    def __repr__(self) -> str:
        return f"Table(length={self.length}, released={self.released}, blocks={self.blocks})"

    @property
    def end(self) -> int:
        """The index after the last block, counted from the sequence's first."""
        return self.released + len(self.blocks)

    @property
    def capacity(self) -> int:
        """The length at which the next token needs another block."""
        return (self.released + len(self.blocks)) * self.pool.block_size

    def lacks(self, length: int) -> int:
        """The blocks that are missing for a length."""
        return -(-length // self.pool.block_size) - self.released - len(self.blocks)

    def at(self, index: int) -> int | None:
        """The block of that number, counted from the sequence's first; None if the table holds none there."""
        return self.blocks[index - self.released] if self.released <= index < self.end else None

    def slot(self, position: int) -> int:
        """The slot of the pool that holds the token at `position`."""
        size = self.pool.block_size
        if not self.released * size <= position < self.length:
            raise IndexError(
                f"position {position} is not held; this table holds {self.released * size} to "
                f"{self.length - 1}"
            )
        return self.blocks[position // size - self.released] * size + position % size


class BlockTable(TableView):
    """The table of a sequence as the books have it.

    It holds one reference per block it names. If two tables name one block at one place, the blocks at all
    earlier places are the same or hold the same content: blocks are shared by forking and by content, in no
    other way.
    """

    __slots__ = ("__weakref__", "digests", "epoch", "near", "stamp", "tenant")

    def __init__(self, pool: BlockPool, near: int = NOWHERE, tenant: str = "") -> None:
        super().__init__(pool, [], 0)
        self.tenant = tenant
        """For whose share the blocks count that it takes (C43)."""
        self.near = near
        """Where the first block should lie, if that one is free: rows side by side can be read as one strided
        view.
        """
        self.stamp = pool.tick()
        """When the table was last used: its blocks are evicted in this order (C20)."""
        self.epoch = pool.epoch
        """The pool's epoch when the first token came."""
        self.digests: list[bytes] = []
        """The names of the leading full blocks that were committed or matched."""
        pool.register(self)

    @property
    def copies_next(self) -> bool:
        """True if the next token is written into a copy of the last block, which others hold or find."""
        pool = self.pool
        if not self.length % pool.block_size:
            return False
        last = self.blocks[-1]
        return pool.references(last) > 1 or (not pool.fills and last in pool.names)

    def append(self, tokens: int) -> list[Copy]:
        """Make room for `tokens` more, or change nothing and raise OutOfBlocks; `append` does several tables
        at once.
        """
        return append([self], [tokens])

    def step(self, now: int) -> Copy | None:
        """Take one more token, as `append` does. The caller has checked that a block is available."""
        pool = self.pool
        copy = None
        if self.length % pool.block_size:
            copy = self._own_last_block()
        else:
            if not self.length:
                self.epoch = pool.epoch
            self.blocks.append(pool.take(self.blocks[-1] + 1 if self.blocks else self.near, self.tenant))
        self.length = self.length + 1
        self.stamp = now
        return copy

    def fill(self, tokens: int, now: int) -> None:
        """Take tokens that fit into the last block, which no other table names and which has no digest."""
        self.length += tokens
        self.stamp = now

    def turn(self, other: BlockTable, tokens: int, now: int) -> None:
        """Take tokens, and write what they come to into the one block of `other`, which gets this one's: as
        if `other` had been freed and this table forked into it. Nobody else holds either block.
        """
        self.blocks, other.blocks = other.blocks, self.blocks
        for block in self.blocks:
            self.pool.uncache(block)
        other.length = self.length
        self.length += tokens
        self.stamp = other.stamp = now

    def _extend(self, tokens: int, now: int) -> Copy | None:
        """Make the last block private if it is written, and add new ones. There are enough blocks for it."""
        pool = self.pool
        copy = None
        inside = self.length % pool.block_size
        if inside:
            copy = self._own_last_block()
        elif not self.length:
            self.epoch = pool.epoch
        self.length += tokens
        more = 0 if 0 < inside <= pool.block_size - tokens else self.lacks(self.length)
        if more:
            near = self.blocks[-1] + 1 if self.blocks else self.near
            self.blocks += (
                (pool.take(near, self.tenant),) if more == 1 else pool.take_several(more, near, self.tenant)
            )
        self.stamp = now
        return copy

    def _own_last_block(self) -> Copy | None:
        """Write in place if the block has no other reference, and drop its hash, which covers other tokens.
        Else copy (C14).
        """
        last = self.blocks[-1]
        pool = self.pool
        if pool.references(last) == 1:
            pool.uncache(last)
            return None
        self.blocks[-1] = pool.take(last + 1, self.tenant)
        pool.drop(last, self.stamp)
        pool.copied(last, self.blocks[-1])
        return Copy(last, self.blocks[-1])

    def seal(self, tokens: int) -> None:
        """The blocks that the first `tokens` tokens fill are computed, and written no more: their bytes are
        final.
        """
        sealed = self.pool.sealed
        if sealed is None or not self.pool.fills:
            return
        for place in reversed(range(min(tokens, self.length) // self.pool.block_size - self.released)):
            if self.blocks[place] in sealed:
                break  # earlier ones were full before
            sealed.seal(self.blocks[place])

    def fork(self) -> BlockTable:
        """A second table over the same blocks. It never allocates and cannot fail (C13)."""
        twin = BlockTable(self.pool, tenant=self.tenant)
        for block in self.blocks:
            self.pool.share(block)
        twin._become(
            self._row()._replace(blocks=list(self.blocks), digests=list(self.digests), stamp=twin.stamp)
        )
        return twin

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens and give back the blocks that only they used."""
        length = self.length - tokens
        if tokens < 0 or length < 0:
            raise ValueError(
                f"cannot take {tokens} tokens from a sequence of {self.length}; give 0 to {self.length}"
            )
        if length < self.released * self.pool.block_size:
            raise ValueError(
                f"cannot go back to {length} tokens: the first {self.released * self.pool.block_size} were "
                "given back behind the sliding window; record the past before generating"
            )
        if not self.pool.fills and 0 < length < self.length:
            raise ValueError(
                f"a sequence of {self.length} tokens cannot go back to {length}: its block holds what all of "
                "them have come to; go back to a copy"
            )
        self.length = length
        while self.end > self.pool.blocks_for(length):
            self.pool.drop(self.blocks.pop(), self.stamp)
        del self.digests[length // self.pool.block_size :]

    def release_before(self, position: int) -> None:
        """Free the blocks that lie wholly before `position`: a sliding window has passed them (C10)."""
        count = min(position // self.pool.block_size, self.length // self.pool.block_size) - self.released
        if count > 0:
            self.pool.drop_several(self.blocks[:count], self.stamp)
            del self.blocks[:count]
            self.released += count

    def free(self) -> None:
        """Give back everything. The table is empty afterwards and may be used again."""
        self.pool.drop_several(self.blocks, self.stamp)
        self._become(_TableRow([], [], 0, 0, self.stamp, self.epoch))

    def _row(self) -> _TableRow:
        return _TableRow(self.blocks, self.digests, self.length, self.released, self.stamp, self.epoch)

    def _become(self, row: _TableRow) -> None:
        self.blocks, self.digests, self.length, self.released, self.stamp, self.epoch = row

    def check(self) -> None:
        """Raise AssertionError unless the table holds exactly the blocks its tokens need (C1, C2)."""
        need = self.pool.blocks_for(self.length)
        if (
            self.end == need
            and len(set(self.blocks)) == len(self.blocks)
            and len(self.digests) <= self.length // self.pool.block_size
        ):
            return  # building the messages below costs more than the check
        expect(self.end == need, f"{self!r} ends at block {self.end}, its tokens at {need}")
        expect(len(set(self.blocks)) == len(self.blocks), f"{self!r} names a block twice")
        expect(
            len(self.digests) <= self.length // self.pool.block_size,
            f"{self!r} has names for blocks that are not full",
        )


def blocks_needed(tables: Sequence[BlockTable], tokens: Sequence[int]) -> int:
    """How many blocks `append` takes from the pool, copies on write included."""
    if not tables:
        return 0
    pool = tables[0].pool
    size = pool.block_size
    need = 0
    written = []
    for table, more in zip(tables, tokens, strict=True):
        if more < 0 or table.pool is not pool:
            raise ValueError(
                f"cannot append {more} tokens to {table!r}; give 0 or more, and tables of one pool in one "
                "call"
            )
        inside = table.length % size
        if inside and more:
            written.append(table.blocks[-1])
        if not 0 < inside <= size - more:
            need += max(0, table.lacks(table.length + more))
    for block, count in Counter(written).items():
        # The last reference writes in place, unless a table outside this step holds one too.
        need += min(count, pool.references(block) - 1)
    return need


def append(tables: Sequence[BlockTable], tokens: Sequence[int], need: int | None = None) -> list[Copy]:
    """Make room for the next tokens of every table, or change nothing and raise OutOfBlocks. need: the answer
    of `blocks_needed`, if that was asked before.

    No target of the copies is a source of them: targets were free a moment ago, sources are still held (C15).
    Tables of one step are equally recent (C20).
    """
    if len(set(tables)) != len(tables):
        raise ValueError(
            f"{len(tables)} rows are only {len(set(tables))} tables; give every table once, with all its "
            "tokens"
        )
    if need is None:
        need = blocks_needed(tables, tokens)
    if not tables:
        return []
    pool = tables[0].pool
    if need > pool.available:
        raise OutOfBlocks(
            f"{need} {pool.unit} are needed for the next step and {pool.available} of {pool.total} are left"
        )
    now = pool.tick()
    copies = [table._extend(more, now) for table, more in zip(tables, tokens, strict=True) if more]
    return [copy for copy in copies if copy]


def reorder(tables: Sequence[BlockTable], sources: Sequence[int]) -> list[BlockTable]:
    """The tables after row i was replaced by row `sources[i]`; the answer may have more or fewer rows.

    Rows keep their table object. A row that is used once moves as it is, so a permutation changes no count. A
    row that is used twice replaces one that is unused, and references change only in the tails where the two
    differ (C6). All references are added before any is dropped: no block in use is free in between.
    """
    check_sources(tables, sources)
    heirs = _heirs(sources)
    # Of the rows that end: from which block on they are dropped.
    tails = {row: 0 for row in range(len(tables)) if row not in heirs}
    moved: list[tuple[int, _TableRow]] = []
    for new, old in enumerate(sources):
        if heirs[old] != new:
            moved.append((new, _second(tables, old, _ending(heirs, new), tails)))
        elif new != old:
            moved.append((new, tables[old]._row()))
    for row, same in tails.items():
        table = tables[row]
        for block in table.blocks[same:]:
            table.pool.drop(block, table.stamp)
    answer = [
        *tables[: len(sources)],
        *(BlockTable(tables[0].pool, tenant=tables[0].tenant) for _ in range(len(sources) - len(tables))),
    ]
    for new, content in moved:
        answer[new]._become(content)
    for table in tables[len(sources) :]:
        table._become(_TableRow([], [], 0, 0, table.stamp, table.epoch))
    return answer


def check_sources(tables: Sequence[BlockTable], sources: Sequence[int]) -> None:
    """Raise IndexError unless every source is the place of a table."""
    if not sources or (min(sources) >= 0 and max(sources) < len(tables)):
        return
    wrong = next(source for source in sources if not 0 <= source < len(tables))
    raise IndexError(f"row {wrong} does not exist; there are {len(tables)} rows")


def _heirs(sources: Sequence[int]) -> dict[int, int]:
    """Which new row keeps the table of each old one: the same row if it uses itself, else the first that uses
    it.
    """
    heirs: dict[int, int] = {}
    for new, old in enumerate(sources):
        if new == old:
            heirs[old] = new
        else:
            heirs.setdefault(old, new)
    return heirs


def _ending(heirs: dict[int, int], new: int) -> int:
    """The old row that ends because row `new` is filled a second time: following the moves leads to the empty
    place.

    It lies in the same beam group, where little differs. The answer is beyond the old rows if there are more
    rows now.
    """
    while new in heirs:
        new = heirs[new]
    return new


def _second(tables: Sequence[BlockTable], old: int, ending: int, tails: dict[int, int]) -> _TableRow:
    """A second row like `old`, built on what it has in common with the row that ends."""
    table = tables[old]
    stamp = tables[old].stamp
    same = 0
    blocks = table.blocks
    if ending in tails:
        same = tails[ending] = _common(table, tables[ending])
        blocks = tables[ending].blocks
        stamp = max(stamp, tables[ending].stamp)
    for block in table.blocks[same:]:
        table.pool.share(block)
    blocks = blocks[:same] + table.blocks[same:]
    return _TableRow(blocks, list(table.digests), table.length, table.released, stamp, table.epoch)


def _common(one: BlockTable, other: BlockTable) -> int:
    """How many leading blocks two rows share, compared from the end: see the invariant in `BlockTable`."""
    same = min(len(one.blocks), len(other.blocks)) if one.released == other.released else 0
    while same and one.blocks[same - 1] != other.blocks[same - 1]:
        same -= 1
    return same
