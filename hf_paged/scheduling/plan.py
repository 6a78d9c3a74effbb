"""A step as a value: the scheduler makes it, the memory and the model carry it out, nobody keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..blocks import Copy
from .decode_batch import DecodeRows
from .request import SequenceGroup, TokenSequence


class ScheduledRow(NamedTuple):
    """`count` tokens of a sequence from `start` on. Their slots are in its tables already.

    samples: the sequences whose next token is chosen from what follows this row's last one. None if the row
    ends before its sequence does (C32); several if a prompt's row stands for all of its group.
    """

    sequence: TokenSequence
    start: int
    count: int  # type: ignore[assignment]  # a row is no tuple to anybody
    samples: tuple[TokenSequence, ...]

    @property
    def tokens(self) -> list[int]:
        """The token ids of the row."""
        return self.sequence.tokens[self.start : self.start + self.count]


@dataclass(frozen=True)
class Swaps:
    """Blocks that go to the host and that come back, for every shelf.

    out: from a block of the device's pool to one of the host's. back: the other way. All that goes out goes
    first: what comes back may be written where that was, and may be among it.
    """

    out: tuple[tuple[Copy, ...], ...] = ()
    back: tuple[tuple[Copy, ...], ...] = ()

    def __bool__(self) -> bool:
        return any(self.out) or any(self.back)


@dataclass(frozen=True)
class StepPlan:
    """What a step does, in this order: swaps, copies, rows.

    stride: the step of those who do nothing but decode, if there are any. others: the rows of everybody else.
    copies: for every shelf the copies on write. swaps: the blocks of preempted groups on their way to the
    host and back. admitted, preempted: who came and who went.
    """

    others: tuple[ScheduledRow, ...] = ()
    copies: tuple[tuple[Copy, ...], ...] = ()
    swaps: Swaps = Swaps()
    admitted: tuple[SequenceGroup, ...] = ()
    preempted: tuple[SequenceGroup, ...] = ()
    stride: DecodeRows | None = None

    def __bool__(self) -> bool:
        """Whether anything is computed."""
        return self.stride is not None or bool(self.others)

    @cached_property
    def rows(self) -> tuple[ScheduledRow, ...]:
        """All rows, the stride's first. Made when somebody asks for them: most steps are carried out
        without.
        """
        if self.stride is None:
            return self.others
        sequences, starts, step = self.stride.sequences, self.stride.starts, self.stride.step
        return *(
            ScheduledRow(each, start + step, 1, (each,))
            for each, start in zip(sequences, starts, strict=True)
        ), *self.others

    @property
    def samples(self) -> bool:
        """Whether anybody gets a token."""
        return self.stride is not None or any(row.samples for row in self.others)

    @property
    def tokens(self) -> int:
        """The tokens of the step."""
        return sum(row.count for row in self.others) + (
            0 if self.stride is None else len(self.stride.sequences)
        )

    @property
    def groups(self) -> list[SequenceGroup]:
        """Whose rows run, each once, in order."""
        return list(dict.fromkeys(row.sequence.group for row in self.rows))
