"""A plan in the making."""

from __future__ import annotations

from ..blocks import Copy
from .plan import Plan, Row, Swaps
from .sequence import Group, Sequence


class Draft:
    """What a step will do, as far as that is known, and the tokens that it still has room for."""

    def __init__(self, shelves: int, room: int) -> None:
        self.room = room
        self.rows: list[Row] = []
        self.copies: list[list[Copy]] = [[] for _ in range(shelves)]
        self.admitted: list[Group] = []
        self.preempted: list[Group] = []

    def plan(self, swaps: Swaps) -> Plan:
        """The step as a value."""
        return Plan(tuple(self.rows), tuple(tuple(copies) for copies in self.copies), swaps, tuple(self.admitted), tuple(self.preempted))


def samples(sequence: Sequence, count: int) -> tuple[Sequence, ...]:
    """Whose next token is known after this row: nobody's if tokens are left, and all of the group's before it is forked."""
    if sequence.computed + count < len(sequence.tokens):
        return ()
    return (sequence,) if sequence.group.forked else tuple(sequence.group.sequences)
