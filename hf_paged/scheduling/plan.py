"""A step as a value: the scheduler makes it, the memory and the model carry it out, nobody keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..blocks import Copy
from .sequence import Group, Sequence


class Row(NamedTuple):
    """`count` tokens of a sequence from `start` on. Their slots are in its tables already.

    samples: the sequences whose next token is chosen from what follows this row's last one. None if the row ends before its
    sequence does (C32); several if a prompt's row stands for all of its group.
    """

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment]  # a row is no tuple to anybody
    samples: tuple[Sequence, ...]

    @property
    def tokens(self) -> list[int]:
        """The token ids of the row."""
        return self.sequence.tokens[self.start : self.start + self.count]


@dataclass(frozen=True)
class Plan:
    """What a step does, in this order: swaps, copies, rows.

    copies: for every shelf the copies on write. swaps: blocks to bring from or to the host; always empty today, because whoever
    is preempted is computed again. admitted, preempted: who came and who went.
    """

    rows: tuple[Row, ...] = ()
    copies: tuple[tuple[Copy, ...], ...] = ()
    swaps: tuple[Copy, ...] = ()
    admitted: tuple[Group, ...] = ()
    preempted: tuple[Group, ...] = ()

    @property
    def tokens(self) -> int:
        """The tokens of the step."""
        return sum(row.count for row in self.rows)

    @property
    def groups(self) -> list[Group]:
        """Whose rows run, each once, in order."""
        return list(dict.fromkeys(row.sequence.group for row in self.rows))
