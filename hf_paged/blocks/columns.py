"""Columns: the numbers that a step's rows carry, one declaration each, and the fillers that give them.

Static tensors of captured steps, messages to other ranks and batches that are divided or reordered walk these
declarations, and name no column. A capability that owns a number declares its column here and registers a
filler; a layer finds the number in the running forward (`model/attention.py: Forward.column`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal, NamedTuple


class Column(NamedTuple):
    """The declaration of a column: a number of at most 32 bits for each row."""

    name: str
    dtype: str = "int32"
    """The type of its tensors, by torch's name."""
    per: Literal["row", "token"] = "row"
    """The entries of its tensors in the engine, where the tokens of all rows lie in one: one for each row, or
    its row's number for each token. In generate() there is one for each row.
    """
    empty: float = 0
    """The number of rows that have none."""
    sent: bool = True
    """True if other ranks get it from rank 0. Else it is empty there, unless the code that runs a step fills
    it itself: no filler is asked on other ranks.
    """
    captured: bool = True
    """True if captured steps have it on the device, where layers read it. Else it is for the code that runs a
    step.
    """


ADAPTER_SLOT = Column("adapter_slot", per="token", empty=-1)
"""The slot of a row's adapter in the table of adapters."""
ROPE_DELTA = Column("rope_delta", "int64", per="token")
"""The number that is added to a row's consecutive positions."""
LOGIT_PLACE = Column("logit_place", "int64", sent=False)
"""The tokens whose logits a step of several tokens a row answers with."""
WANTED = Column("wanted", empty=1, captured=False)
"""1 if a token is chosen from the logits behind a row, 0 if the row ends before its sequence does."""
SCORED = Column("scored", captured=False)
"""How many tokens of a prompt the logits behind a row score: those that follow its first ones."""
SOURCE = Column("source", captured=False)
"""The tokens that a row attends to across, of its encoder or its pictures."""
STATE_READ = Column("state_read", "int64", empty=-1)
"""The slot from which a row reads its recurrent states; none behind no token."""
STATE_WRITTEN = Column("state_written", "int64", empty=-1)
"""The slot to which a row writes its recurrent states."""
TASK = Column("task", empty=-1, captured=False)
"""The number of a row's task, of an adapter that computes each of its tasks in another way."""
COLUMNS = {
    each.name: each
    for each in (
        ADAPTER_SLOT,
        ROPE_DELTA,
        LOGIT_PLACE,
        WANTED,
        SCORED,
        SOURCE,
        STATE_READ,
        STATE_WRITTEN,
        TASK,
    )
}
"""All columns, by name."""

Numbers = Mapping[str, tuple[int, ...]]
"""By column the number of every row. A column that is not there is empty in all rows."""
NO_NUMBERS: Numbers = MappingProxyType({})


@contextmanager
def declared(column: Column) -> Iterator[Column]:
    """Declare one more column meanwhile, around all that has rows with it."""
    if column.name in COLUMNS:
        raise ValueError(f"there is a column {column.name!r} already; take another name")
    COLUMNS[column.name] = column
    try:
        yield column
    finally:
        del COLUMNS[column.name]


def with_numbers(numbers: Numbers, name: str, given: Sequence[int]) -> Numbers:
    """The numbers with those of one column; the same object if nothing changes."""
    filled = tuple(given)
    if filled.count(COLUMNS[name].empty) < len(filled):
        return numbers if numbers.get(name) == filled else {**numbers, name: filled}
    if name not in numbers:
        return numbers
    return {key: each for key, each in numbers.items() if key != name} or NO_NUMBERS


def selected(numbers: Numbers, rows: Sequence[int]) -> Numbers:
    """The numbers of some rows, in this order."""
    found = NO_NUMBERS
    for name, given in numbers.items():
        found = with_numbers(found, name, [given[row] for row in rows])
    return found


def by_token(numbers: Numbers, counts: Sequence[int]) -> Numbers:
    """The numbers as a forward over all tokens in one row reads them: row i has counts[i] tokens."""
    return {
        name: tuple([each for each, count in zip(given, counts, strict=True) for _ in range(count)])
        if COLUMNS[name].per == "token"
        else given
        for name, given in numbers.items()
    }


MOST = 2**31
"""Numbers are below it, and not below its negative."""


def no_column(name: str) -> ValueError:
    """The error of a name that no declaration has, or none that a layer may read."""
    if name in COLUMNS:
        return ValueError(f"column {name!r} is for the code that runs a step; layers find no numbers there")
    return ValueError(
        f"there is no column {name!r}, expected one of {sorted(COLUMNS)}; declare it in blocks/columns.py "
        "and add it to COLUMNS"
    )


Filler = Callable[[Sequence[Any]], Sequence[int]]
"""A function that gives the number of every row."""


class ColumnFillers:
    """The fillers of columns, each of the owner of its numbers.

    Rows are sequences in the engine, and their places in the call in generate(). A filler's answer counts
    until the rows change or its owner calls `renew`: a steady step asks none.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Filler] = {}
        self._stale: set[str] = set()
        """Columns to be filled anew."""
        self._last: tuple[Sequence[Any], Numbers] = (), NO_NUMBERS
        """The last rows and their numbers: one value, so that no interrupt parts them."""

    def fill(self, name: str, filler: Filler | None) -> None:
        """Have a column filled by this function from now on; None: by none, so that it is empty."""
        if name not in COLUMNS:
            raise no_column(name)
        if filler is None:
            self.by_name.pop(name, None)
            self.forget()
        else:
            self.by_name[name] = filler
            self.renew(name)

    def renew(self, name: str) -> None:
        """Ask the filler of a column again: its numbers may have changed."""
        self._stale.add(name)

    def forget(self) -> None:
        """Forget the last rows."""
        self._last = (), NO_NUMBERS

    def of(self, rows: Sequence[Any]) -> Numbers:
        """The numbers of rows: the same object as before if they are the same, and so is each column."""
        known, numbers = self._last
        same = rows is known or rows == known
        if same and not self._stale:
            return numbers
        for name, filler in self.by_name.items():
            if not same or name in self._stale:
                given = filler(rows)
                if given and not (min(given) >= -MOST and max(given) < MOST):
                    raise ValueError(
                        f"column {name!r} was given {min(given)} to {max(given)}, expected at most 32 bits"
                    )
                numbers = with_numbers(numbers, name, given)
        self._last = rows, numbers
        self._stale.clear()
        return numbers
