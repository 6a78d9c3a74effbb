"""A step as one row of numbers: rank 0 writes what its runner takes, the others read it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from operator import add, is_
from typing import NamedTuple, cast

from ...blocks import COLUMNS, NO_NUMBERS, BlockPool, BlockTable, BlockTableArray, Copy, Numbers
from ...model.slots import CROSS
from ...scheduling import ScheduledBatch, StepPlan, Swaps, TokenSequence
from ..multimodal import PromptInputs
from ..sampling.scores import Scored
from ..worker.forward_batch import PLAIN, ForwardBatch, LastTokens, RowInputs
from ..worker.pools import Pools
from .prompt_inputs import UNCHANGED, SentRow, SharedInputs

UNSEEN = -1
"""In the place of a token that only rank 0's device has."""


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


class Preparation(NamedTuple):
    """Work of the pools before the rows of a step."""

    swaps: Swaps
    copies: tuple[tuple[Copy, ...], ...]

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
    known: dict[int, int]
    """By row the last tokens that rank 0's host has: they count, whatever came along."""
    batch: ForwardBatch
    news: AdapterNews


class StepEncoder:
    """Writes steps for ranks that know the steps before: of tables what has changed, of rows those that are
    new.
    """

    def __init__(self, shared: SharedInputs, groups: int) -> None:
        """groups: how many pools there are."""
        self._shared = shared
        self._groups = groups
        self._cross: dict[int, tuple[int, list[int]]] = {}
        """By row the length and the blocks of the last table across that was written."""
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
        count = rows.decodes
        columns = (rows.row_ids, rows.counts)
        same = len(columns) == len(self._rows) and all(map(is_, columns, self._rows))
        # Each goes on where it was: rows that nobody has joined or left advance alike.
        known = same and sum(rows.starts[:1]) == self._end
        unseen = bool(count) and rows.sequences[:count] == batch.unseen[:count]
        ids = array("i") if unseen else array("i", [_last(each) for each in rows.sequences[:count]])
        ids.extend(_ids_behind(batch))
        shares = unseen or UNSEEN in ids
        out = array("i", [checks, shares, known, unseen, len(rows.sequences), count, rows.longest])
        out.append(len(preparations))
        for each in preparations:
            _write_preparation(out, each, self._groups)
        if not known:
            for column in (rows.row_ids, rows.starts, rows.counts):
                out.extend(column)
            self._rows = columns
        self._end = sum(rows.starts[:1]) + sum(rows.counts[:1])
        out.extend([bool(samples) for samples in rows.samples[count:]])
        out.extend([_scored(batch, i) for i in range(count, len(rows))])
        out.append(len(ids))
        out.extend(ids)
        self._write_tables(out, rows)
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
        if not some:
            self._cross.clear()
        for i in range(batch.rows.decodes, len(batch.rows)) if some else ():
            sequence = batch.rows.sequences[i]
            row = SentRow.of(batch.inputs.get(i, PLAIN), sequence)
            cross = row.length, list(row.blocks or ())
            if cross == self._cross.get(sequence.row):
                row = row._replace(blocks=None)
            self._cross[sequence.row] = cross
            row.write(out, 0 if row.inputs.prompt is None else self._shared.of(sequence.group))

    def _write_columns(self, out: array[int], numbers: Numbers) -> None:
        """Write the columns whose numbers are others than in the step before."""
        before, self._numbers = self._numbers, numbers
        out.append(numbers is before)
        if numbers is before:
            return
        for column in COLUMNS.values():
            if column.sent:
                given = numbers.get(column.name, ())
                same = given is before.get(column.name, ())
                out.append(UNCHANGED if same else len(given))
                out.extend(() if same else given)

    def _write_tables(self, out: array[int], rows: ScheduledBatch) -> None:
        """Write the changes of tables since the last step; of arrays that are new the rows of the step."""
        if self._tables is not rows.tables:
            self._tables = rows.tables
            for i, tables in enumerate(rows.tables):
                tables.journal = [(each.row, 0, each.tables[i].end) for each in rows.sequences]
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
        self._kinds = list(pools.own)
        self._tables = tuple(BlockTableArray() for _ in pools.own)
        self._columns = (array("i"), array("i"), array("i"))
        """The rows of the last step, where each began and what it took."""
        self._sequences: dict[int, _RankRow] = {}
        self._members: tuple[TokenSequence, ...] = ()
        self._numbers = NO_NUMBERS
        self.prompts: dict[int, PromptInputs] = {}
        """Inputs of rows, by rank 0's numbers."""

    def decode(self, numbers: Sequence[int]) -> Received:
        """The step that numbers stand for."""
        read = iter(numbers)
        checks, shares, known, unseen, many, decodes, longest = _take(read, 7)
        groups = len(self._pools.groups)
        preparations = [_read_preparation(read, groups) for _ in range(next(read))]
        row_ids, starts, counts = self._columns
        if known:
            starts = array("i", map(add, starts, counts))
        else:
            row_ids, starts, counts = (array("i", _take(read, many)) for _ in range(3))
            self._members = tuple([self._row(row) for row in row_ids])
        self._columns = (row_ids, starts, counts)
        samples = _take(read, many - decodes)
        scored = _take(read, many - decodes)
        ids = _take(read, next(read))
        for tables in self._tables:
            for _ in range(next(read)):
                row, first, count = _take(read, 3)
                tables.write(row, first, array("i", _take(read, count)))
        news = AdapterNews.read(read)
        if not next(read):
            self._numbers = self._read_columns(read)
        members = self._members
        alone = tuple([(each,) for each in members[:decodes]])
        behind = zip(members[decodes:], samples, strict=True)
        rows = ScheduledBatch(
            sequences=members,
            row_ids=row_ids,
            starts=starts,
            counts=counts,
            samples=alone + tuple([(each,) * wanted for each, wanted in behind]),
            tables=self._tables,
            longest=longest,
            tokens=decodes + sum(counts[decodes:]),
            decodes=decodes,
        )
        own = [] if unseen else ids[:decodes]
        for number in _take(read, next(read)):
            self.prompts.pop(number, None)
        inputs = self._enter(rows, ids[len(own) :], scored, read if next(read) else None)
        on_host = {row: token for row, token in zip(row_ids, own, strict=False) if token != UNSEEN}
        batch = ForwardBatch(rows, self._last_tokens, inputs, members[:decodes], self._numbers)
        return Received(preparations, bool(checks), bool(shares), on_host, batch, news)

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

    def _row(self, number: int) -> _RankRow:
        if number not in self._sequences:
            self._sequences[number] = _RankRow(number, self)
        return self._sequences[number]

    def _enter(
        self, rows: ScheduledBatch, ids: list[int], scored: list[int], given: Iterator[int] | None
    ) -> dict[int, RowInputs]:
        """Note the place of every row, and what those behind the first ones are: they are inputs. given:
        what they are beside ids, if any is.
        """
        own = cast(tuple[_RankRow, ...], rows.sequences)
        for row, start, count in zip(own, rows.starts, rows.counts, strict=True):
            row.start = start
            row.end = start + count
        begin = 0
        inputs = {}
        for i, count in enumerate(scored, rows.decodes):
            end = begin + rows.counts[i]
            known = [token for token in ids[begin:end] if token != UNSEEN]
            row = own[i]
            read = SentRow()
            if given is not None:
                read = SentRow.read(given, self.prompts, row.start, rows.counts[i])
            if read.blocks is not None:
                row.cross = [self._cross(read.blocks, read.length)] if read.length else []
            # Which tokens are scored is rank 0's; how many makes the shape of what all ranks compute.
            scores = Scored([0] * count, 0) if count else None
            inputs[i] = read.inputs._replace(ids=known, scored=scores)
            begin = end
        return inputs

    def tables(self, row: _RankRow) -> tuple[BlockTable, ...]:
        """A row's tables in this step, as far as its tokens read them."""
        return tuple([self._table(number, row) for number in range(len(self._tables))] + row.cross)

    def _table(self, number: int, row: _RankRow) -> BlockTable:
        pool = list(self._pools.own.values())[number].pool
        released = self._kinds[number].reach(row.start, pool.block_size)
        blocks = self._tables[number].read(row.row, released, pool.blocks_for(row.end) - released)
        return _read_only(pool, blocks.tolist(), row.end, released)

    def _cross(self, blocks: Sequence[int], length: int) -> BlockTable:
        return _read_only(self._pools.groups[CROSS].pool, list(blocks), length)


class _RankRow(TokenSequence):
    """A sequence of rank 0's, as far as a forward reads it."""

    __slots__ = ("_decoder", "cross", "end", "start")

    def __init__(self, row: int, decoder: StepDecoder) -> None:
        self.row = row
        self.start = 0
        self.end = 0
        self.tokens = []
        self.computed = 0
        self.cross: list[BlockTable] = []
        """The table of what it attends to across, if there is any."""
        self._decoder = decoder

    @property
    def tables(self) -> tuple[BlockTable, ...]:  # type: ignore[override]  # nothing gives it others
        """Its tables, made when they are read: a captured step reads the arrays instead."""
        return self._decoder.tables(self)


def _read_only(pool: BlockPool, blocks: list[int], length: int, released: int = 0) -> BlockTable:
    """A table of rank 0's: the pool of this rank has no books of it."""
    table = BlockTable.__new__(BlockTable)
    table.pool = pool
    table.blocks = blocks
    table.length = length
    table.released = released
    return table


def _scored(batch: ForwardBatch, row: int) -> int:
    """How many tokens of a row are scored."""
    scored = batch.inputs.get(row, PLAIN).scored
    return 0 if scored is None else len(scored.tokens)


def _last(sequence: TokenSequence) -> int:
    return sequence.tokens[-1] if len(sequence.tokens) > sequence.computed else UNSEEN


def _ids_behind(batch: ForwardBatch) -> list[int]:
    """The ids of the other rows; a last one may be on its way to the host. What is no id has any."""
    found: list[int] = []
    for i, row in enumerate(batch.rows.other_rows, batch.rows.decodes):
        known = row.tokens
        if batch.inputs.get(i, PLAIN).prompt is not None:  # names of up to 64 bits
            known = [max(token, 0) for token in known]
        found += known + [UNSEEN] * (row.count - len(known))
    return found


def _take(read: Iterator[int], count: int) -> list[int]:
    return [next(read) for _ in range(count)]


def _write_preparation(out: array[int], preparation: Preparation, groups: int) -> None:
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

    out = several()
    back = several()
    return Preparation(Swaps(out, back), several())
