"""A step as a value: the scheduler makes it, the memory and the model carry it out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from ..blocks import BlockTableArray, Copy
from ..blocks.pool import MAX_BLOCK_SIZE
from .request import SequenceGroup, TokenSequence


class ScheduledRow(NamedTuple):
    """`count` tokens of a sequence from `start` on. Their slots are in its tables already.

    samples: the sequences whose next token is chosen from what follows this row's last one. None if the row
    ends before its sequence does (C32); several if a prompt's row stands for all of its group.
    """

    sequence: TokenSequence
    start: int
    count: int  # type: ignore[assignment]  # nothing uses a row as a tuple
    samples: tuple[TokenSequence, ...]

    @property
    def tokens(self) -> list[int]:
        """The token ids of the row."""
        return self.sequence.tokens[self.start : self.start + self.count]


_column = partial(array, "i")


@dataclass(frozen=True)
class ForwardRows:
    """The rows of a forward as columns: row i computes counts[i] tokens of its sequence from starts[i] on.

    row_ids: the row that each sequence owns while it runs. tables: for every KV cache group the block tables
    of all running sequences, by the row that they own, until the next step is planned. longest: the tokens of
    the longest sequence with this step's. tokens: of all rows. decodes: how many rows, the first ones, take
    one token each, and one sample of their own sequence.
    """

    row_ids: array[int] = field(default_factory=_column)
    starts: array[int] = field(default_factory=_column)
    counts: array[int] = field(default_factory=_column)
    tables: tuple[BlockTableArray, ...] = ()
    longest: int = 0
    tokens: int = 0
    decodes: int = 0

    def __len__(self) -> int:
        return len(self.row_ids)

    def select(self, rows: Sequence[int]) -> ForwardRows:
        """Some of the rows, in this order; all of them count as planned one by one."""
        counts = array("i", [self.counts[i] for i in rows])
        return ForwardRows(
            array("i", [self.row_ids[i] for i in rows]),
            array("i", [self.starts[i] for i in rows]),
            counts,
            self.tables,
            self.longest,
            sum(counts),
        )


@dataclass(frozen=True)
class ScheduledBatch(ForwardRows):
    """The rows of a step with their sequences.

    samples: as of `ScheduledRow`. full: sequences with a block that this step fills, and their tokens then.
    last: the decode rows whose sequence gets its last token.
    """

    sequences: tuple[TokenSequence, ...] = ()
    samples: tuple[tuple[TokenSequence, ...], ...] = ()
    full: tuple[tuple[TokenSequence, int], ...] = ()
    last: tuple[int, ...] = ()

    def followed_by(self, rows: Sequence[ScheduledRow]) -> ScheduledBatch:
        """The batch with more rows after its own; their tables are entered in the arrays."""
        if not rows:
            return self
        sequences, starts, counts, samples = zip(*rows, strict=True)
        ends = [start + count for _, start, count, _ in rows]
        for sequence in sequences:
            for tables, table in zip(self.tables, sequence.tables, strict=False):
                tables.put(sequence.row, table)
        size = min([MAX_BLOCK_SIZE, *(table.pool.block_size for table in sequences[0].tables)])
        full = [
            (sequence, end)
            for sequence, start, end in zip(sequences, starts, ends, strict=True)
            if end // size > start // size
        ]
        return replace(
            self,
            sequences=self.sequences + sequences,
            row_ids=self.row_ids + array("i", [sequence.row for sequence in sequences]),
            starts=self.starts + array("i", starts),
            counts=self.counts + array("i", counts),
            samples=self.samples + samples,
            longest=max(self.longest, *ends),
            tokens=self.tokens + sum(counts),
            full=(*self.full, *full),
        )

    def select(self, rows: Sequence[int]) -> ScheduledBatch:
        return ScheduledBatch(
            **vars(super().select(rows)),
            sequences=tuple([self.sequences[i] for i in rows]),
            samples=tuple([self.samples[i] for i in rows]),
        )

    @cached_property
    def rows(self) -> tuple[ScheduledRow, ...]:
        """The rows one by one, for code that handles each of them."""
        return tuple(map(ScheduledRow, self.sequences, self.starts, self.counts, self.samples))

    @property
    def other_rows(self) -> tuple[ScheduledRow, ...]:
        """The rows behind those of one token each, one by one."""
        return self.rows[self.decodes :] if len(self.sequences) > self.decodes else ()

    @cached_property
    def sampled(self) -> tuple[TokenSequence, ...]:
        """The sequences that get a token, in the order of the rows."""
        if self.decodes == len(self.sequences):
            return self.sequences
        behind = [sequence for samples in self.samples[self.decodes :] for sequence in samples]
        return (*self.sequences[: self.decodes], *behind)


NOTHING = ScheduledBatch()


class Swaps(NamedTuple):
    """Blocks that go to the host and that come back, for every KV cache group.

    out: from a block of the device's pool to one of the host's. back: the other way. All that goes out goes
    first: what comes back may be written where that was, and may be among it.
    """

    out: tuple[tuple[Copy, ...], ...] = ()
    back: tuple[tuple[Copy, ...], ...] = ()

    def __bool__(self) -> bool:
        return any(self.out) or any(self.back)


class StepPlan(NamedTuple):
    """The work of a step, in this order: swaps, copies, rows.

    copies: for every KV cache group the copies on write. swaps: the blocks of preempted groups on their way
    to the host and back. admitted, preempted: the groups that begin to run in it and that do not run any
    more. takes_blocks: whether it may take, copy or swap any, which the pools prepare.
    """

    batch: ScheduledBatch = NOTHING
    copies: tuple[tuple[Copy, ...], ...] = ()
    swaps: Swaps = Swaps()
    admitted: tuple[SequenceGroup, ...] = ()
    preempted: tuple[SequenceGroup, ...] = ()
    takes_blocks: bool = False

    def __bool__(self) -> bool:
        """True if anything is computed."""
        return bool(self.batch.sequences)

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        """The rows of the batch, one by one."""
        return self.batch.rows

    @property
    def tokens(self) -> int:
        """The tokens of the step."""
        return self.batch.tokens

    @property
    def groups(self) -> list[SequenceGroup]:
        """The groups of the rows, each once, in order."""
        return list(dict.fromkeys(sequence.group for sequence in self.batch.sequences))
