"""A step as one row of numbers: rank 0 writes what its runner takes, and other ranks make the same of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from operator import add, is_
from typing import NamedTuple

from ...blocks import COLUMNS, NO_NUMBERS, BlockTableArray, Copy, Due, Numbers
from ...kv.checksums import NO_CHECKS, ByteChecks
from ...scheduling import ForwardRows, StepPlan, Swaps
from ..multimodal import PromptInputs
from ..worker.forward_batch import PLAIN, ForwardBatch, LastTokens, RowInputs
from ..worker.pools import Pools
from .prompt_inputs import SharedInputs, read_inputs, write_inputs

UNCHANGED = -1
"""In the place of the number of entries of a column that the other ranks know."""


class MessageKind(IntEnum):
    """The kind of a message, its first number."""

    STEP = 0
    CHECK = 1
    PAUSE = 2
    CLOSE = 3
    ADAPTER = 4
    INPUTS = 5
    """Inputs of prompts beside token ids."""
    ENCODE = 6
    """The same of pictures or recordings, which are encoded at once."""
    BROADCAST = 7
    RESERVE = 8
    """So many first blocks of every pool need memory now."""
    RESERVE_HOST = 9
    """The same of the blocks on the host, of one pool."""
    WARM_UP = 10
    """Capture a step that no request has yet."""
    SEAL = 11
    """Take the checksums of blocks that are written no more."""
    PLACE = 12
    """Bring adapters into a slot."""


class Preparation(NamedTuple):
    """Work of the pools before the rows of a step."""

    swaps: Swaps
    copies: tuple[tuple[Copy, ...], ...]
    checks: ByteChecks = NO_CHECKS

    @property
    def plan(self) -> StepPlan:
        """A plan of this alone."""
        return StepPlan(copies=self.copies, swaps=self.swaps)


class AdapterNews(NamedTuple):
    """News of adapters since the message before. They have numbers here."""

    gone: tuple[int, ...] = ()
    """Those that the engine has forgotten."""
    places: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Slots that hold others now, and which."""

    def write(self, out: array[int]) -> None:
        """Append this as numbers."""
        out.append(len(self.gone))
        out.extend(self.gone)
        out.append(len(self.places))
        for slot, numbers in self.places:
            out.extend((slot, len(numbers), *numbers))

    @classmethod
    def read(cls, numbers: Iterator[int]) -> AdapterNews:
        """The news as `write` wrote it."""
        gone = tuple(_take(numbers, next(numbers)))
        places = [(next(numbers), tuple(_take(numbers, next(numbers)))) for _ in range(next(numbers))]
        return cls(gone, tuple(places))


class Received(NamedTuple):
    """A step as another rank got it."""

    preparations: list[Preparation]
    checks: bool
    """True if rank 0 checks its model in this step."""
    shares: bool
    """True if rank 0's last tokens come along, on the device."""
    batch: ForwardBatch
    news: AdapterNews


class StepEncoder:
    """Writes steps for ranks that know the steps before: of tables what has changed, of rows those that are
    new.
    """

    def __init__(self, shared: SharedInputs, pools: Pools) -> None:
        self._shared = shared
        self._pools = pools
        self._tables: tuple[BlockTableArray, ...] = ()
        self._rows: tuple[array[int], ...] = ()
        """The rows of the last step, and the tokens that each took."""
        self._end = 0
        """The length of the first of them behind it."""
        self._numbers = NO_NUMBERS

    def encode(
        self, batch: ForwardBatch, preparations: Sequence[Preparation], checks: bool, news: AdapterNews
    ) -> tuple[array[int], bool]:
        """The numbers of a step, and whether the last tokens on the device must come along."""
        rows = batch.rows
        columns = (rows.row_ids, rows.counts)
        same = len(columns) == len(self._rows) and all(map(is_, columns, self._rows))
        # Each goes on where it was: rows that nobody has joined or left advance alike.
        known = same and sum(rows.starts[:1]) == self._end
        shares = batch.unseen
        anew = self._tables is not rows.tables
        out = array("i", [checks, shares, known, anew, len(rows), rows.decodes, rows.longest])
        out.append(len(preparations))
        for each in preparations:
            _write_preparation(out, each, len(self._pools.groups))
        if not known:
            for column in (rows.row_ids, rows.starts, rows.counts):
                out.extend(column)
            self._rows = columns
        self._end = sum(rows.starts[:1]) + sum(rows.counts[:1])
        out.append(len(batch.host_ids))
        out.extend(batch.host_ids)
        self._write_tables(out, rows, anew)
        news.write(out)
        self._write_columns(out, batch.columns)
        self._write_given(out, batch)
        return out, shares

    def _write_given(self, out: array[int], batch: ForwardBatch) -> None:
        """Write the inputs of the other rows beside token ids, if any."""
        gone = self._shared.take_gone()
        out.append(len(gone))
        out.extend(gone)
        some = any(row.prompt is not None or row.positions is not None for row in batch.inputs.values())
        out.append(some)
        for i in range(batch.rows.decodes, len(batch.rows)) if some else ():
            write_inputs(out, batch.inputs.get(i, PLAIN), self._shared)

    def _write_columns(self, out: array[int], numbers: Numbers) -> None:
        """Write the columns whose numbers are others than in the step before."""
        before, self._numbers = self._numbers, numbers
        out.append(numbers is before)
        if numbers is before:
            return
        for column in COLUMNS.values():
            if column.sent:
                given = numbers.get(column.name, ())
                same = given == before.get(column.name, ())
                out.append(UNCHANGED if same else len(given))
                out.extend(() if same else given)

    def _write_tables(self, out: array[int], rows: ForwardRows, anew: bool) -> None:
        """Write the changes of tables since the last step; of arrays that are new all rows."""
        if anew:
            self._tables = rows.tables
            for tables in rows.tables:
                tables.journal = [(row, 0, tables.width) for row in tables.rewritten(0)]
        for tables in rows.tables:
            journal = tables.journal or []
            tables.journal = []
            out.append(len(journal))
            for row, first, count in journal:
                out.extend((row, first, count))
                out.extend(tables.read(row, first, count))


class StepDecoder:
    """Reads what a StepEncoder has written, and keeps the tables as they are on rank 0."""

    def __init__(self, pools: Pools, last_tokens: LastTokens) -> None:
        self._pools = pools
        self._last_tokens = last_tokens
        self._tables = tuple(BlockTableArray() for _ in pools.groups)
        self._columns = (array("i"), array("i"), array("i"))
        """The rows of the last step, where each began and what it took."""
        self._numbers = NO_NUMBERS
        self.prompts: dict[int, PromptInputs] = {}
        """Inputs of rows, by rank 0's numbers."""

    def decode(self, numbers: Sequence[int]) -> Received:
        """The step that numbers stand for."""
        read = iter(numbers)
        checks, shares, known, anew, many, decodes, longest, prepared = _take(read, 8)
        groups = len(self._pools.groups)
        preparations = [_read_preparation(read, groups) for _ in range(prepared)]
        row_ids, starts, counts = self._columns
        if known:
            starts = array("i", map(add, starts, counts))
        else:
            row_ids, starts, counts = (array("i", _take(read, many)) for _ in range(3))
        self._columns = (row_ids, starts, counts)
        ids = array("i", _take(read, next(read)))
        if anew:
            self._tables = tuple(BlockTableArray() for _ in self._tables)
        for tables in self._tables:
            for _ in range(next(read)):
                row, first, count = _take(read, 3)
                tables.write(row, first, array("i", _take(read, count)))
        news = AdapterNews.read(read)
        if not next(read):
            self._numbers = self._read_columns(read)
        tokens = decodes + sum(counts[decodes:])
        rows = ForwardRows(row_ids, starts, counts, self._tables, longest, tokens, decodes)
        for number in _take(read, next(read)):
            self.prompts.pop(number, None)
        inputs: dict[int, RowInputs] = {}
        for i in range(decodes, many) if next(read) else ():
            inputs[i] = read_inputs(read, self.prompts, starts[i], counts[i])
        batch = ForwardBatch(rows, self._last_tokens, ids, inputs, self._numbers)
        return Received(preparations, bool(checks), bool(shares), batch, news)

    def _read_columns(self, read: Iterator[int]) -> Numbers:
        """The columns of a step in which some differ from those of the step before."""
        found: dict[str, tuple[int, ...]] = {}
        for column in COLUMNS.values():
            count = next(read) if column.sent else 0
            before = self._numbers.get(column.name, ())
            given = before if count == UNCHANGED else tuple(_take(read, count))
            if given:
                found[column.name] = given
        return found or NO_NUMBERS


def _take(read: Iterator[int], count: int) -> list[int]:
    return [next(read) for _ in range(count)]


def _write_preparation(out: array[int], preparation: Preparation, groups: int) -> None:
    write_checks(out, preparation.checks, groups)
    swaps = preparation.swaps
    for several in (swaps.out, swaps.back, preparation.copies):
        for i in range(groups):
            copies = several[i] if i < len(several) else ()
            out.append(len(copies))
            for copy in copies:
                out.extend(copy)


def _read_preparation(read: Iterator[int], groups: int) -> Preparation:
    def several() -> tuple[tuple[Copy, ...], ...]:
        return tuple(tuple(Copy(*_take(read, 2)) for _ in range(next(read))) for _ in range(groups))

    checks = read_checks(read, groups)
    out = several()
    back = several()
    return Preparation(Swaps(out, back), several(), checks)


def write_checks(out: array[int], checks: ByteChecks, groups: int) -> None:
    """Append the blocks of checks as numbers; why they are due matters on rank 0 alone."""
    for i in range(groups):
        due = [each.block for each in checks.due[i]] if checks else []
        fresh = checks.fresh[i] if checks else ()
        out.extend((len(due), *due, len(fresh), *fresh))


def read_checks(read: Iterator[int], groups: int) -> ByteChecks:
    """The checks as `write_checks` wrote them."""
    due, fresh = [], []
    for _ in range(groups):
        due.append(tuple([Due(block, "shared") for block in _take(read, next(read))]))
        fresh.append(tuple(_take(read, next(read))))
    return ByteChecks(tuple(due), tuple(fresh))
