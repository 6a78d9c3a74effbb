"""Those who do nothing but decode: a step of all of them costs what happens in it, and next to nothing for
each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..blocks import BlockTable, BlockTableArray
from ..blocks.pool import NOWHERE, expect
from .limits import KVCacheGroup
from .request import SequenceGroup, TokenSequence


class DecodeRows(NamedTuple):
    """A step of the crew: one token of each, whose slots are in the tables already.

    sequences: the crew by places, the same object as long as nobody joins or leaves. starts: where each had
    come to before the crew's first step, none of them further than `most`. step: how many steps it has taken;
    member i computes its token number starts[i] + step. sheets: for every shelf the crew's tables, as they
    are until the next step is planned. filled: whose block is full after it, and at how many tokens. last:
    the places of those who may get one more token and no other.
    """

    sequences: tuple[TokenSequence, ...]
    starts: array[int]
    most: int
    step: int
    sheets: tuple[BlockTableArray, ...]
    filled: tuple[tuple[TokenSequence, int], ...]
    last: tuple[int, ...]

    @property
    def longest(self) -> int:
        """The tokens of the longest with this step's."""
        return self.most + self.step + 1


class DecodeBatch:
    """The running groups of one sequence that take one token in every step, each at its place.

    What they do alike is counted once. A block is needed when the one before it is full, which is known
    beforehand for each of them: the rest of the step adds a token to every table. Places stay until somebody
    leaves: then the last one moves there. The scheduler says who joins and who leaves; who is not in the crew
    is planned by itself.
    """

    def __init__(self, shelves: tuple[KVCacheGroup, ...]) -> None:
        """shelves: those whose tables grow with the tokens; a member's cross-attention table is empty."""
        self.shelves = shelves
        self.sequences: list[TokenSequence] = []
        self.clear()

    def clear(self) -> None:
        """Nobody is in it any more."""
        for sequence in self.sequences:
            sequence.place = None
        self.sequences = []
        self.steps = 0
        self.sheets = tuple(BlockTableArray() for _ in self.shelves)
        self._starts = array("i")
        self._tables: list[list[BlockTable]] = [[] for _ in self.shelves]
        self._full: list[dict[TokenSequence, None]] = [{} for _ in range(self._size)]
        """By the number of a step, up to multiples of the block size: who has only full blocks before it."""
        self._ends: dict[int, dict[TokenSequence, None]] = {}
        """By the number of a step: who is complete before it, if nothing happens to him meanwhile."""
        self._now: Sequence[int] = [0 for _ in self.shelves]
        self._as_it_is: tuple[tuple[TokenSequence, ...], array[int], int] | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def _size(self) -> int:
        return self.shelves[0].pool.block_size

    # ---- who comes and goes

    def accepts(self, group: SequenceGroup) -> bool:
        """Whether a group may join: nobody else names the block that it would write in next."""
        if group.request.width > 1 or not group.request.steady or not group.decoding or group.request.source:
            return False
        return all(
            not table.length % self._size or table.pool.references(table.blocks[-1]) == 1
            for table in group.leader.tables
        )

    def join(self, sequence: TokenSequence) -> None:
        """Take a sequence in, which is one token behind."""
        sequence.place = place = len(self.sequences)
        self.sequences.append(sequence)
        start = sequence.computed - self.steps
        self._starts.append(start)
        self._full[-start % self._size][sequence] = None
        self._ends.setdefault(self._end_of(sequence), {})[sequence] = None
        for shelf, sheet, tables, table in zip(
            self.shelves, self.sheets, self._tables, self._growing(sequence), strict=True
        ):
            if table.length % self._size:
                shelf.pool.withdraw(table.blocks[-1])  # a name from before something was taken back would lie
            if shelf.window is not None:
                table.release_before(table.length - shelf.window + 1)
            sheet.put(place, table)
            tables.append(table)
        self._as_it_is = None

    def leave(self, sequence: TokenSequence) -> None:
        """Let a sequence go, as it is."""
        place, last = sequence.place, len(self.sequences) - 1
        assert place is not None
        del self._full[-self._starts[place] % self._size][sequence]
        end = self._ends.get(self._end_of(sequence), {})
        end.pop(sequence, None)
        if not end:
            self._ends.pop(self._end_of(sequence), None)
        for table, now in zip(self._growing(sequence), self._now, strict=True):
            table.stamp = max(table.stamp, now)
        columns: list[list[Any] | array[int]] = [self.sequences, self._starts, *self._tables]
        for column in columns:
            column[place] = column[last]
            column.pop()
        if place != last:
            self.sequences[place].place = place
            for sheet in self.sheets:
                sheet.move(last, place)
        sequence.place = None
        self._as_it_is = None

    def complete(self) -> list[TokenSequence]:
        """Who is as long as he may become, and takes no further step."""
        return [sequence for sequence in self._ends.get(self.steps, ()) if sequence.group.complete]

    def stands(self, stride: DecodeRows) -> bool:
        """Whether nobody has joined or left since a stride."""
        return self._as_it_is is not None and self._as_it_is[0] is stride.sequences

    def _growing(self, sequence: TokenSequence) -> tuple[BlockTable, ...]:
        """The tables of a member that take its tokens."""
        return sequence.tables[: len(self.shelves)]

    def _end_of(self, sequence: TokenSequence) -> int:
        """The number of the step that a member does not take any more: with the one before it gets its last
        token.
        """
        assert sequence.place is not None
        return sequence.group.request.most_tokens - 1 - self._starts[sequence.place]

    # ---- a step

    def need(self) -> int:
        """The blocks of every pool that the next step takes; what lies behind a window goes back first
        (C10).
        """
        growing = self._full[self.steps % self._size]
        for i, shelf in enumerate(self.shelves):
            if shelf.window is not None:
                for sequence in growing:
                    table = sequence.tables[i]
                    table.stamp = max(table.stamp, self._now[i])
                    table.release_before(table.length - shelf.window + 1)
        return len(growing)

    def step(self, now: Sequence[int]) -> DecodeRows | None:
        """One token for everybody; every pool has the blocks for it."""
        if not self.sequences:
            return None
        self._now = now[: len(self.shelves)]
        for sequence in self._full[self.steps % self._size]:
            self._extend(sequence)
        for tables in self._tables:
            for table in tables:
                table.length += 1
        self.steps += 1
        if self._as_it_is is None:
            self._as_it_is = tuple(self.sequences), self._starts[:], max(self._starts)
        sequences, starts, most = self._as_it_is
        filled = tuple([(each, each.tables[0].length) for each in self._full[self.steps % self._size]])
        last = tuple([each.place for each in self._ends.get(self.steps, ()) if each.place is not None])
        return DecodeRows(sequences, starts, most, self.steps - 1, self.sheets, filled, last)

    def _extend(self, sequence: TokenSequence) -> None:
        """A new block for a sequence whose blocks are full."""
        assert sequence.place is not None
        for sheet, table, now in zip(self.sheets, self._growing(sequence), self._now, strict=True):
            table.stamp = now
            table.blocks.append(table.pool.take(table.blocks[-1] + 1 if table.blocks else NOWHERE))
            sheet.add(sequence.place, table)

    def renamed(self, sequence: TokenSequence, first: int) -> None:
        """A member's tables name other blocks from their block `first` on."""
        if sequence.place is not None:
            for sheet, table in zip(self.sheets, self._growing(sequence), strict=True):
                sheet.put(sequence.place, table, first)

    # ---- the audit

    def check(self) -> None:
        """Raise AssertionError on the first thing that does not add up."""
        for place, sequence in enumerate(self.sequences):
            expect(
                sequence.place == place,
                f"{sequence!r} is in place {place} of the crew and takes {sequence.place} for it",
            )
            expect(
                self._starts[place] + self.steps == sequence.computed,
                f"{sequence!r} is out of step with the crew",
            )
            expect(
                sequence in self._full[-self._starts[place] % self._size],
                f"nobody knows when {sequence!r} needs a block",
            )
            for sheet, tables, table in zip(self.sheets, self._tables, self._growing(sequence), strict=True):
                expect(tables[place] is table, f"{sequence!r} has other tables than the crew")
                expect(sheet.of(place, table), f"{sequence!r} has other blocks than the crew's sheet")
            expect(
                sequence in self._ends.get(self._end_of(sequence), ()), f"nobody knows when {sequence!r} ends"
            )
        for what in (self._full, self._ends.values()):
            expect(sum(map(len, what)) == len(self.sequences), "the crew waits for somebody who left")
