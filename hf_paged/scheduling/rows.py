"""The rows of sequences that decode, as columns: they are kept from step to step, and brought forward all at
once.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from operator import attrgetter
from sys import byteorder
from typing import NamedTuple

from ..blocks import BlockTable, BlockTableArray
from ..blocks.pool import NOWHERE, expect
from .limits import KVCacheGroup, finest
from .plan import ScheduledBatch, ScheduledRow
from .plan_builder import to_sample
from .request import SequenceGroup, TokenSequence


class _Columns(NamedTuple):
    """The members in the order of their rows, until one joins, leaves or takes another number of tokens.

    ones: the counts of a step of one token each. one: these as one large integer. tables: of all members and
    KV cache groups.
    """

    sequences: tuple[TokenSequence, ...]
    row_ids: array[int]
    ones: array[int]
    one: int
    samples: tuple[tuple[TokenSequence, ...], ...]
    tables: list[BlockTable]


class RowTable:
    """The sequences of running groups that decode, each with a length of its own.

    In most steps every row takes one token. A row takes what its sequence is behind: several tokens where the
    host has several that are not computed, none while its sequence waits. A row needs a block when its tables
    have no room for what it takes: the step in which that is so is noted when its limit changes. The last use
    of a table is stamped when its sequence leaves. The scheduler decides which group joins and leaves; groups
    outside are planned row by row.
    """

    def __init__(self, kv_groups: tuple[KVCacheGroup, ...]) -> None:
        """kv_groups: all of them. A member's tables that do not grow with its tokens are empty."""
        self.kv_groups = tuple([each for each in kv_groups if each.kind.grows])
        """Those whose tables grow, the first ones of all."""
        self._all = len(kv_groups)
        self._finest = kv_groups[finest(kv_groups)].pool.block_size
        self.clear()

    def clear(self) -> None:
        """Begin anew without members."""
        self.tables = tuple(BlockTableArray() for _ in range(self._all))
        """The block tables of all running sequences by their rows: members' are kept up to date here, others'
        are entered with each step of theirs."""
        self._limits: dict[TokenSequence, int] = {}
        """The members, and the length at which each needs a block or is complete."""
        self.growing: dict[TokenSequence, int] = {}
        """Members that need blocks in the next step, and their places in the columns."""
        self.ending: dict[TokenSequence, None] = {}
        """Members that are as long as they may become, if nothing has happened since they got there."""
        self.uneven: dict[TokenSequence, int] = {}
        """Members that take another number of tokens than one in the next step, and how many."""
        self._columns: _Columns | None = None
        self._lengths = array("i")
        """The tokens that each of the columns' members has computed, those in flight included."""
        self._steps = 0
        """The steps that they have taken since the columns were made."""
        self._due: defaultdict[int, list[int]] = defaultdict(list)
        """The places of the columns' members that come to their limits, by the step in which they do."""
        self._longest = 0
        """The largest of their lengths."""

    def __len__(self) -> int:
        return len(self._limits)

    def __contains__(self, sequence: TokenSequence) -> bool:
        return sequence in self._limits

    # ---- members

    def accepts(self, group: SequenceGroup) -> bool:
        """True if a group may join: no other table names a block that its sequences will write next."""
        in_prompt = group.leader.computed < len(group.request.prompt)  # whose rows may be more than ids
        if in_prompt or not group.request.batchable or not group.decoding or group.request.source:
            return False
        if any(sequence.complete for sequence in group.sequences):
            return False
        return not any(table.copies_next for sequence in group.sequences for table in sequence.tables)

    def join(self, sequence: TokenSequence) -> None:
        """Add a sequence whose prompt is computed."""
        for kv_group, tables, table in zip(
            self.kv_groups, self.tables, self._tables_of(sequence), strict=False
        ):
            if table.length % kv_group.pool.block_size:
                kv_group.pool.uncache(table.blocks[-1])  # a name from before a crop would be wrong
            kv_group.kind.release(table)
            tables.put(sequence.row, table)
        self._limits[sequence] = 0
        self._columns = None
        self.note(sequence)

    def leave(self, sequence: TokenSequence) -> None:
        """Remove a sequence, without guesses that no step has computed."""
        if sequence.computed < len(sequence.tokens):
            sequence.keep_drafts(0)
        del self._limits[sequence]
        self.growing.pop(sequence, None)
        self.ending.pop(sequence, None)
        self.uneven.pop(sequence, None)
        for table in self._tables_of(sequence):
            table.stamp = table.pool.tick()
        self._columns = None

    def note(self, sequence: TokenSequence) -> None:
        """A member has another length, or takes another number of tokens than before."""
        takes = sequence.pending
        if takes == 1:
            self.uneven.pop(sequence, None)
        else:
            self.uneven[sequence] = takes
        self._limits[sequence] = self._limit_of(sequence)
        self.growing.pop(sequence, None)
        if self._lacks(sequence):
            self.growing[sequence] = 0
        if sequence.complete:
            self.ending[sequence] = None
        self._columns = None

    def complete(self) -> list[TokenSequence]:
        """Members that are as long as they may become, and take no further step."""
        return [sequence for sequence in self.ending if sequence.complete]

    def _lacking(self, i: int, sequences: Iterable[TokenSequence]) -> list[int]:
        """The blocks of pool `i` that each of these members needs for what it takes in the next step."""
        uneven = self.uneven
        return [each.tables[i].lacks(each.computed + uneven.get(each, 1)) for each in sequences]

    def _lacks(self, sequence: TokenSequence) -> bool:
        return any(any(self._lacking(i, (sequence,))) for i in range(len(self.kv_groups)))

    def _takes(self, sequence: TokenSequence) -> int:
        """The tokens that a member takes in the next step."""
        return self.uneven.get(sequence, 1)

    def _tables_of(self, sequence: TokenSequence) -> tuple[BlockTable, ...]:
        """The tables of a member that take its tokens."""
        return sequence.tables[: len(self.kv_groups)]

    def _limit_of(self, sequence: TokenSequence) -> int:
        limit = sequence.group.request.most_tokens - 1
        for table in self._tables_of(sequence):
            limit = min(limit, table.capacity)
        return limit

    # ---- a step

    def need(self) -> list[int]:
        """The blocks that the next step takes of every pool; blocks behind a window go back first (C10)."""
        found = []
        for i, kv_group in enumerate(self.kv_groups):
            for sequence in self.growing if kv_group.kind.releases else ():
                table = sequence.tables[i]
                table.stamp = kv_group.pool.tick()
                kv_group.kind.release(table)
            of_one = not self.uneven and kv_group.pool.block_size == self._finest  # each needs one
            found.append(len(self.growing) if of_one else sum(self._lacking(i, self.growing)))
        return found

    def growth(self, i: int) -> Counter[str]:
        """The blocks of pool `i` that the next step takes for the sequences of each tenant."""
        growth: Counter[str] = Counter()
        if i < len(self.kv_groups):
            for sequence, blocks in zip(self.growing, self._lacking(i, self.growing), strict=True):
                growth[sequence.group.request.tenant] += blocks
        return growth

    def limit(self, most: int) -> None:
        """Let the rows take at most so many tokens in the next step, and no fewer than one each that takes
        any. Guesses that have no room are forgotten.
        """
        room = max(0, most - len(self) + sum(not takes for takes in self.uneven.values()))
        for sequence, takes in list(self.uneven.items()):
            more = min(takes - 1, room)
            if takes > 1 and more < takes - 1:
                sequence.keep_drafts(max(0, sequence.drafts - (takes - 1 - more)))
                self.note(sequence)
                if sequence.pending > 1:
                    self.uneven[sequence] = 1 + more
            room -= max(0, more)

    @property
    def pending(self) -> int:
        """The tokens that the rows take in the next step."""
        return len(self) + sum(takes - 1 for takes in self.uneven.values())

    def step(self) -> ScheduledBatch:
        """One token of every row that takes one, and behind them the rows that take several; every pool has
        the blocks for it.
        """
        for sequence, place in self.growing.items():
            self._limits[sequence] = limit = self._grow(sequence)
            if self._columns is not None:
                self._due[self._steps + limit - self._lengths[place]].append(place)
        self.growing = {}
        columns = self._columns = self._columns or self._made_columns()
        sequences, starts = columns.sequences, self._lengths
        # All rows at once, as one large integer: no length carries over.
        ends = int.from_bytes(starts.tobytes(), byteorder) + columns.one
        self._lengths = lengths = array("i", ends.to_bytes(starts.itemsize * len(starts), byteorder))
        self._longest += bool(sequences)
        self._steps += 1
        for table in columns.tables:
            table.length += 1
        full, last = [], []
        for place in sorted(self._due.pop(self._steps, ())):
            sequence, length = sequences[place], lengths[place]
            if length >= sequence.group.request.most_tokens - 1:
                last.append(place)
                self.ending[sequence] = None
            if not length % self._finest:
                full.append((sequence, length))
                self.growing[sequence] = place
        batch = ScheduledBatch(
            columns.row_ids,
            starts,
            columns.ones,
            self.tables,
            self._longest,
            len(sequences),
            len(sequences),
            sequences,
            columns.samples,
            tuple(full),
            tuple(last),
        )
        return batch.followed_by(self._several()) if self.uneven else batch

    def _several(self) -> list[ScheduledRow]:
        """The rows that take several tokens; those that take none are in no step."""
        self._columns = None
        rows = []
        for sequence, takes in sorted(self.uneven.items(), key=lambda each: each[0].row):
            for table in self._tables_of(sequence) if takes else ():
                table.length += takes
            if takes:
                rows.append(ScheduledRow(sequence, sequence.computed, takes, to_sample(sequence, takes)))
        return rows

    def _made_columns(self) -> _Columns:
        """The rows that take one token each."""
        members = [sequence for sequence in self._limits if sequence not in self.uneven]
        sequences = tuple(sorted(members, key=attrgetter("row")))
        self._lengths = array("i", [sequence.computed for sequence in sequences])
        self._steps, self._due = 0, defaultdict(list)
        for place, (sequence, length) in enumerate(zip(sequences, self._lengths, strict=True)):
            self._due[self._limits[sequence] - length].append(place)
        self._longest = max(self._lengths, default=0)
        ones = array("i", [1]) * len(sequences)
        return _Columns(
            sequences,
            array("i", [sequence.row for sequence in sequences]),
            ones,
            int.from_bytes(ones.tobytes(), byteorder),
            tuple([(sequence,) for sequence in sequences]),
            [table for sequence in sequences for table in self._tables_of(sequence)],
        )

    def _grow(self, sequence: TokenSequence) -> int:
        """Give a sequence the blocks of what it takes: its new limit."""
        length = sequence.computed + self.uneven.get(sequence, 1)
        limit = sequence.group.request.most_tokens - 1
        for _, tables, table in zip(self.kv_groups, self.tables, sequence.tables, strict=False):
            capacity, pool, blocks = table.capacity, table.pool, table.blocks
            while capacity < length:
                blocks.append(pool.take(blocks[-1] + 1 if blocks else NOWHERE, table.tenant))
                tables.add(sequence.row, table)
                capacity += pool.block_size
            if capacity < limit:
                limit = capacity
        return limit

    def renamed(self, sequence: TokenSequence, first: int) -> None:
        """The tables of a sequence name other blocks from their block `first` on."""
        if sequence in self._limits:
            for tables, table in zip(self.tables, self._tables_of(sequence), strict=False):
                tables.put(sequence.row, table, first)

    # ---- the audit

    def check(self) -> None:
        """Raise AssertionError on the first thing that does not add up."""
        for names in (self.growing, self.ending, self.uneven):
            expect(names.keys() <= self._limits.keys(), "the table waits for a sequence that left")
        for sequence, limit in self._limits.items():
            expect(sequence.row >= 0, f"{sequence!r} is in the table of rows without a row")
            expect(limit == self._limit_of(sequence), f"{sequence!r} has another limit than its blocks")
            takes = self._takes(sequence)
            expect(takes == sequence.pending, f"{sequence!r} takes {takes} tokens, not {sequence.pending}")
            expect(
                self._lacks(sequence) == (sequence in self.growing),
                f"the table does not know whether {sequence!r} needs a block",
            )
            expect(
                sequence in self.ending or not sequence.complete,
                f"the table does not know that {sequence!r} ends",
            )
            for tables, table in zip(self.tables, self._tables_of(sequence), strict=False):
                expect(tables.matches(sequence.row, table), f"{sequence!r} has other blocks than its row")
        if self._columns is not None:
            lengths = dict(zip(self._columns.sequences, self._lengths, strict=True))
            expect(
                lengths == {sequence: sequence.computed for sequence in self._limits},
                "a row has another length than its sequence",
            )
            due = {place: step - self._steps for step, places in self._due.items() for place in places}
            limits = {each: lengths[each] + due.get(place, 0) for place, each in enumerate(lengths)}
            reached = self.growing.keys() | self.ending.keys()
            expect(
                all(limits[each] == limit or each in reached for each, limit in self._limits.items()),
                "a row has another limit than its sequence",
            )
            expect(sum(map(len, self._due.values())) == len(due), "a row comes to its limit twice")
