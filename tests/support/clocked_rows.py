"""The table of rows as it was with one clock for all: the oracle of what the table with a length for each row does
when every row takes one token.
"""

from __future__ import annotations

from array import array
from collections import Counter
from operator import attrgetter
from typing import NamedTuple

from hf_paged.blocks import BlockTable, BlockTableArray
from hf_paged.blocks.pool import MAX_BLOCK_SIZE, NOWHERE, expect
from hf_paged.scheduling import KVCacheGroup, ScheduledBatch, SequenceGroup, TokenSequence


class _Columns(NamedTuple):
    """The members in the order of their rows, until one joins or leaves.

    offsets: row i begins step number s of the batch with offsets[i] + s computed tokens. tables: of all
    members and KV cache groups. most: the largest offset.
    """

    sequences: tuple[TokenSequence, ...]
    row_ids: array[int]
    offsets: array[int]
    counts: array[int]
    samples: tuple[tuple[TokenSequence, ...], ...]
    tables: list[BlockTable]
    most: int


class ClockedRows:
    """The sequences of running groups that take one token each in every step.

    A block is needed when the one before it is full, which is known beforehand for each member: the rest of a
    step adds a token to every table. The last use of a table is stamped when its sequence leaves. The
    scheduler decides which group joins and leaves; groups outside are planned row by row.
    """

    def __init__(self, kv_groups: tuple[KVCacheGroup, ...]) -> None:
        """kv_groups: those whose tables grow with the tokens; a member's cross-attention table is empty."""
        self.kv_groups = kv_groups
        self.block_size = min([MAX_BLOCK_SIZE, *(kv_group.pool.block_size for kv_group in kv_groups)])
        """The smallest of all: where a larger block is full, one of these is, too."""
        self.clear()

    def clear(self) -> None:
        """Begin anew without members."""
        self.steps = 0
        self.tables = tuple(BlockTableArray() for _ in self.kv_groups)
        """The block tables of all running sequences by their rows: members' are kept up to date here, others'
        are entered with each step of theirs."""
        self._offsets: dict[TokenSequence, int] = {}
        """The members, and how many tokens each had computed before the first step of the batch."""
        self._growing: list[dict[TokenSequence, None]] = [{} for _ in range(self.block_size)]
        """By the number of a step (modulo the block size): members that need a new block in it, one of the
        smallest size at least.
        """
        self.ends: dict[int, dict[TokenSequence, None]] = {}
        """By the number of a step: members that are complete before it, if nothing happens until then."""
        self.growing = self._growing[0]
        """Members that need a new block in the next step."""
        self._columns: _Columns | None = None

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, sequence: TokenSequence) -> bool:
        return sequence in self._offsets

    # ---- members

    def accepts(self, group: SequenceGroup) -> bool:
        """True if a group may join: no other table names a block that its sequences will write next."""
        in_prompt = group.leader.computed < len(group.request.prompt)  # whose rows may be more than ids
        if in_prompt or not group.request.batchable or not group.decoding or group.request.source:
            return False
        return not any(table.copies_next for sequence in group.sequences for table in sequence.tables)

    def join(self, sequence: TokenSequence) -> None:
        """Add a sequence that is one token behind."""
        offset = sequence.computed - self.steps
        self._offsets[sequence] = offset
        self._growing[-offset % self.block_size][sequence] = None
        self.ends.setdefault(self._end_of(sequence), {})[sequence] = None
        for kv_group, tables, table in zip(
            self.kv_groups, self.tables, self._tables_of(sequence), strict=True
        ):
            if table.length % kv_group.pool.block_size:
                kv_group.pool.uncache(table.blocks[-1])  # a name from before a crop would be wrong
            kv_group.kind.release(table)
            tables.put(sequence.row, table)
        self._columns = None

    def leave(self, sequence: TokenSequence) -> None:
        """Remove a sequence, as it is."""
        end = self._end_of(sequence)
        del self.ends[end][sequence]
        if not self.ends[end]:
            del self.ends[end]
        del self._growing[-self._offsets.pop(sequence) % self.block_size][sequence]
        for table in self._tables_of(sequence):
            table.stamp = table.pool.tick()
        self._columns = None

    def complete(self) -> list[TokenSequence]:
        """Members that are as long as they may become, and take no further step."""
        return [sequence for sequence in self.ends.get(self.steps, ()) if sequence.group.complete]

    def _tables_of(self, sequence: TokenSequence) -> tuple[BlockTable, ...]:
        """The tables of a member that take its tokens."""
        return sequence.tables[: len(self.kv_groups)]

    def _end_of(self, sequence: TokenSequence) -> int:
        """The number of the first step that a member does not take: the one before it brings its last
        token.
        """
        return sequence.group.request.most_tokens - 1 - self._offsets[sequence]

    # ---- a step

    uneven = ()

    @property
    def ending(self) -> bool:
        return self.steps in self.ends

    @property
    def pending(self) -> int:
        return len(self._offsets)

    def growth(self, i: int) -> Counter[str]:
        several = [
            each for each in self.growing if not each.tables[i].length % each.tables[i].pool.block_size
        ]
        return Counter(sequence.group.request.tenant for sequence in several)

    def limit(self, most: int) -> None:
        """Every row takes one token."""

    def note(self, sequence: TokenSequence) -> None:
        raise AssertionError(f"{sequence!r} takes another number of tokens than one")

    def need(self) -> list[int]:
        """The blocks of each pool that the next step takes; blocks behind a window go back first (C10)."""
        found = []
        for i, kv_group in enumerate(self.kv_groups):
            if kv_group.kind.releases:
                for sequence in self.growing:
                    table = sequence.tables[i]
                    table.stamp = kv_group.pool.tick()
                    kv_group.kind.release(table)
            size = kv_group.pool.block_size
            found.append(sum([not sequence.tables[i].length % size for sequence in self.growing]))
        return found

    def step(self) -> ScheduledBatch:
        """One token of every member; every pool has the blocks for it."""
        for sequence in self.growing:
            self._add_block(sequence)
        columns = self._columns = self._columns or self._made_columns()
        for table in columns.tables:
            table.length += 1
        self.steps += 1
        self.growing = self._growing[self.steps % self.block_size]
        return ScheduledBatch(
            columns.row_ids,
            array("i", [offset + self.steps - 1 for offset in columns.offsets]),
            columns.counts,
            self.tables,
            columns.most + self.steps,
            len(columns.sequences),
            len(columns.sequences),
            columns.sequences,
            columns.samples,
            tuple([(each, each.tables[0].length) for each in self.growing]),
            tuple([columns.sequences.index(each) for each in self.ends.get(self.steps, ())]),
        )

    def _made_columns(self) -> _Columns:
        sequences = tuple(sorted(self._offsets, key=attrgetter("row")))
        offsets = array("i", [self._offsets[sequence] for sequence in sequences])
        return _Columns(
            sequences,
            array("i", [sequence.row for sequence in sequences]),
            offsets,
            array("i", [1]) * len(sequences),
            tuple([(sequence,) for sequence in sequences]),
            [table for sequence in sequences for table in self._tables_of(sequence)],
            max(offsets, default=0),
        )

    def _add_block(self, sequence: TokenSequence) -> None:
        """New blocks for a sequence, of the groups whose last one is full."""
        for tables, table in zip(self.tables, self._tables_of(sequence), strict=True):
            if table.length % table.pool.block_size:
                continue
            near = table.blocks[-1] + 1 if table.blocks else NOWHERE
            table.blocks.append(table.pool.take(near, table.tenant))
            tables.add(sequence.row, table)

    def renamed(self, sequence: TokenSequence, first: int) -> None:
        """The tables of a sequence name other blocks from their block `first` on."""
        if sequence in self._offsets:
            for tables, table in zip(self.tables, self._tables_of(sequence), strict=True):
                tables.put(sequence.row, table, first)

    # ---- the audit

    def check(self) -> None:
        """Raise AssertionError on the first thing that does not add up."""
        for sequence, offset in self._offsets.items():
            expect(sequence.row >= 0, f"{sequence!r} is in the decode batch without a row")
            expect(offset + self.steps == sequence.computed, f"{sequence!r} is out of step with the batch")
            expect(
                sequence in self._growing[-offset % self.block_size],
                f"the batch does not know when {sequence!r} needs a block",
            )
            expect(
                sequence in self.ends.get(self._end_of(sequence), ()),
                f"the batch does not know when {sequence!r} ends",
            )
            for tables, table in zip(self.tables, self._tables_of(sequence), strict=True):
                expect(tables.matches(sequence.row, table), f"{sequence!r} has other blocks than its row")
        for what in (self._growing, self.ends.values()):
            expect(sum(map(len, what)) == len(self._offsets), "the batch waits for a sequence that left")
