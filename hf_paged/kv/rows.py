"""The rows of one cache in one group: their tables, and what a step does to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from ..blocks import (
    BlockTable,
    Copy,
    LayerKind,
    Match,
    SharedReads,
    adopt,
    append,
    blocks_needed,
    check_sources,
    commit,
    commit_tail,
    detach,
    reorder,
)
from .batch import RowBatch, StridedView
from .checksums import CorruptedBlock
from .group import ROOM_FOR, LayerGroup
from .static import StaticBatch


class Reorder(NamedTuple):
    """The stamp of rows after row i was replaced by row sources[i]."""

    before: object
    """Their stamp until then."""
    sources: Sequence[int]


class Rows:
    """One table per row, each with a length of its own.

    A model is handed as many columns of every row. The tokens of a row are the last of them: it begins at
    column starts[i], and a row that takes fewer tokens of a step than there are columns begins that much
    later. Left padding is the same from the first step on, and is not stored.

    The cache is an engine without a scheduler: this is its list of running sequences.
    """

    def __init__(self, group: LayerGroup) -> None:
        self.group = group
        self._tables: list[BlockTable] = []
        self.starts: list[int] | None = None
        """The column at which each row begins; None where no row is padded."""
        self.columns = 0
        """The columns that a model was handed of every row."""
        self.expected_columns = 0
        """The most columns that rows are expected to have; 0 if unknown."""
        self.expected_rows = 0
        """The rows after the prompt, once equal ones are forked; 0 for as many as now."""
        self._keep_past = False
        self._cut = 0
        """The column at which blocks behind the window were last freed, while the past is kept."""
        self.keeps_prefixes = False
        """True if other rows may begin with the blocks of these: a new pool then gets room for more than one
        call.
        """
        self._strided: StridedView | None = None
        self.torn = False
        """True if a step broke off between the books and the tensors: the contents of the rows are unknown.
        """
        self.stamp: object = object()
        """A new object after every change: a caller that noted it can tell whether its copy is current. After
        a reorder that is a `Reorder`.
        """
        self._counted = 0
        """Tokens of every row that `columns` counts and the tables do not have yet."""
        self._room = 0
        """Tokens that need no new block: every row owns its last block, with room for so many."""
        self._batch: RowBatch | None = None
        self._workspace: dict[str, Any] = {}
        self._shared = SharedReads.of(
            self.kind, group.pool.block_size, group.config.shared_reads, on_cpu=True
        )
        """The rows that read common blocks together in steps that are not captured."""

    @property
    def kind(self) -> LayerKind:
        """The kind of its group's layers."""
        return self.group.kind

    @property
    def tables(self) -> list[BlockTable]:
        """The rows' tables, up to date."""
        if self._counted:
            self._enter()
        return self._tables

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self._tables)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each row."""
        return [max(0, self.columns - start) for start in self.starts or [0] * self.count]

    @property
    def keep_past(self) -> bool:
        """True if blocks that the window has passed stay until `crop`, which bounds how far back the next
        step may reach.
        """
        return self._keep_past

    @keep_past.setter
    def keep_past(self, value: bool) -> None:
        if value and not self._keep_past:
            self._cut = self.columns
        self._keep_past = value

    @property
    def recorded(self) -> int:
        """The columns that a window keeps beyond its own, until `crop`."""
        return self.columns - self._cut if self._keep_past else 0

    def begin_at(self, starts: list[int] | None) -> None:
        """Set the column at which each row begins; earlier columns are padding and are not stored."""
        self.starts = list(starts) if starts is not None and any(starts) else None

    # ---- a step

    def extend(self, rows: int, new: int, counts: Sequence[int] | None = None) -> RowBatch:
        """Make room for `new` columns in every row and copy what must be copied; on failure nothing has
        changed. counts: how many of them each row takes, its last ones; all by default.
        """
        with self.group.memory.lock:
            if counts is None and new <= self._room and rows == len(self._tables) and not self._counted:
                return self._fill(new)
            need = self._make_room(rows, new, counts)
            with self._whole():
                copies = self._append(new, counts, need)
                if copies:
                    self.group.copy(copies)
            room = 0 if self.kind.releases else self._own_room()  # else a step may give back blocks
            return self._changed(new, same_blocks=not need, room=room, counts=counts)

    def _fill(self, new: int) -> RowBatch:
        """A step of `new` columns that every row's own last block has room for."""
        self.require_whole()
        self.torn = True
        now = self.group.pool.tick()
        for table in self._tables:
            table.fill(new, now)
        self.columns += new
        self.torn = False
        return self._changed(new, same_blocks=True, room=self._room - new)

    def _own_room(self) -> int:
        """Tokens that fit into every row's last block; a block that was just written is the row's own."""
        size = self.group.pool.block_size
        return min(-table.length % size for table in self._tables)

    def advance(self, new: int, static: StaticBatch) -> None:
        """A step of `new` columns of a captured forward, whose index tensors are `static`'s.

        Where only lengths change the device advances by itself and the step is merely counted here; else all
        is uploaded.
        """
        with self.group.memory.lock:
            if self._room >= new and static.stamp is self.stamp:
                self.require_whole()
                self._room -= new
                self._counted += new
                self.columns += new
                self._batch = None
                static.stamp = self.stamp = object()
                return
            sources = None if self.kind.releases else _sources(self.stamp, static.stamp, self.count)
            need = self._make_room(self.count, new)
            with self._whole():
                copies = self._append(new, None, need)
                self.stage(new, static, copies, sources)
                if copies:
                    with self.group.copying(copies):
                        self.group.copy_pairs(*static.copies(len(copies)))
            self._room = self._own_room()

    def stage(
        self,
        new: int,
        static: StaticBatch,
        copies: Sequence[Copy] = (),
        sources: Sequence[int] | None = None,
    ) -> None:
        """Upload the step of `new` columns that these rows have just taken, with the lengths before it.
        sources: of each row the one that it was when `static` was last loaded, if nothing else has changed.
        """
        self._changed(new)
        static.load(self.tables, new, self.columns - new, copies, sources)
        static.stamp = self.stamp

    def _enter(self) -> None:
        """Append the tokens that were only counted to the tables, whose blocks have room for them."""
        counted = self._counted
        self._counted = 0
        self._room = 0
        if not self.torn:
            append(self._tables, [counted] * len(self._tables))

    def _make_room(self, rows: int, new: int, counts: Sequence[int] | None = None) -> int:
        """Reserve the blocks of a step of `new` columns, so it cannot fail: how many it takes."""
        first_step = self.columns == 0
        if counts is not None and (len(counts) != rows or not 0 <= min(counts) <= max(counts) <= new):
            raise ValueError(f"{rows} rows take 0 to {new} tokens each; got counts={list(counts)}")
        if first_step:
            self._open(rows)
        elif rows != self.count:
            raise other_rows(self.count, rows)
        if not self.keep_past:
            self._release()
        need = blocks_needed(self.tables, counts or self._new_tokens(new))
        try:
            if first_step:
                self.group.refuse_hopeless(self.expected_columns, self._row_blocks(new))
            self.group.make_room(need, self._hint(rows, new) if first_step else 0)
        except BaseException:
            if first_step:
                self._tables = []
            raise
        if first_step:
            self._lay_out()
        return need

    def _append(self, new: int, counts: Sequence[int] | None, need: int) -> list[Copy]:
        """Enter a step of `new` columns, which takes `need` blocks, in the tables; the answer is what must be
        copied before it is written.
        """
        first_step = self.columns == 0
        for table in self.tables if self.group.checksums is not None else ():
            table.seal(table.length)
        copies = append(self.tables, counts or self._new_tokens(new), need)
        self._check_bytes()
        self.columns += new
        if counts is not None:
            self.begin_at([self.columns - table.length for table in self._tables])
            self._strided = self._strided if self.starts is None else None
        self._keep_strided(bool(copies) or first_step or new > 1)
        return copies

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Change the rows. What breaks it off (an interrupt, a device error) leaves them torn, so they are
        not read again.
        """
        self.require_whole()
        if self._counted:
            self._enter()
        suspect = self.group.memory.suspect
        self.group.memory.suspect = True
        self.torn = True
        yield
        self.torn = False
        self.group.memory.suspect = suspect

    def require_whole(self) -> None:
        """Raise if a step broke off: the content of the blocks is unknown then."""
        if self.torn:
            raise RuntimeError(
                "a step of this cache broke off in the middle, so its content is not known; use a new cache"
            )

    def _open(self, rows: int) -> None:
        if self.starts is not None and len(self.starts) != rows:
            raise ValueError(f"this cache was prepared for {len(self.starts)} rows and was given {rows}")
        for table in self.tables:
            table.free()
        self._strided = None
        self._tables = [BlockTable(self.group.pool) for _ in range(rows)]

    def _new_tokens(self, new: int) -> list[int]:
        if self.starts is None:
            return [new] * self.count
        return [min(new, max(0, self.columns + new - start)) for start in self.starts]

    def _row_blocks(self, new: int) -> int:
        """Blocks of one row at its expected length."""
        size = self.group.pool.block_size
        return self.kind.blocks_for(size, max(self.expected_columns, self.columns + new), max(new, size))

    def _hint(self, rows: int, new: int) -> int:
        """The blocks that these rows may come to hold, a prompt's counted once for all rows that are forked
        from it.
        """
        whole = self._row_blocks(new)
        calls = ROOM_FOR if self.keeps_prefixes and not self.group.pool.total else 1
        if self.expected_rows <= rows:
            return calls * rows * whole
        prompt = self.group.pool.blocks_for(self.columns + new)
        return calls * (rows * prompt + self.expected_rows * (max(0, whole - prompt) + 1))

    def _lay_out(self) -> None:
        """Request blocks that keep each row contiguous and all rows at one distance."""
        pool = self.group.pool
        stride = pool.blocks_for(max(self.expected_columns, 1))
        first = (
            pool.find_run(stride * len(self.tables))
            if self.expected_columns and self.starts is None
            else None
        )
        if first is not None:
            self._strided = StridedView(first * pool.block_size, stride * pool.block_size)
            for i, table in enumerate(self.tables):
                table.near = first + i * stride

    def _keep_strided(self, look_closely: bool) -> None:
        """Drop the strided view once a block lies elsewhere; after one token only the last blocks can."""
        if self._strided is None:
            return
        size = self.group.pool.block_size
        for i, table in enumerate(self.tables):
            home = (self._strided.first + i * self._strided.stride) // size
            last_in_place = not table.blocks or table.blocks[-1] == home + table.end - 1
            if not last_in_place or (
                look_closely and table.blocks != list(range(home + table.released, home + table.end))
            ):
                self._strided = None
                return

    def _release(self) -> None:
        """Give back what no later step attends to."""
        if self.kind.releases:
            for table in self.tables:
                self.kind.release(table)

    def _changed(
        self,
        new: int = 0,
        same_blocks: bool = False,
        room: int = 0,
        counts: Sequence[int] | None = None,
        stamp: object = None,
    ) -> RowBatch:
        self.stamp = stamp = stamp or object()
        self._room = room
        if not same_blocks:
            self._workspace.pop("tables", None)
            self._workspace.pop("groups", None)
        tables, shared = self.tables, self._shared
        groups = None
        if shared is not None and self._strided is None and len(tables) > 1:
            groups = partial(shared.follow_tables, tables, new)
        self._batch = RowBatch(
            tables,
            self.starts,
            self.columns,
            new,
            self._strided,
            lambda: stamp is self.stamp,
            self._workspace,
            counts,
            groups,
        )
        return self._batch

    @property
    def batch(self) -> RowBatch:
        """The index tensors of the current state."""
        return self._batch if self._batch is not None else self._changed()

    # ---- checks of bytes

    def _check_bytes(self) -> None:
        """Before the next write: check the blocks that are due. A CUDA device's answers are read behind the
        step.
        """
        checksums = self.group.checksums
        if checksums is not None:
            self.group.check_bytes()
            checksums.launch()
            if not checksums.by_call:
                self.require_sound(latest=all(device.type == "cpu" for device in self.group.devices))

    def require_sound(self, latest: bool = True) -> None:
        """Raise if a block of these rows is known to be corrupted. latest: whether to wait for the checks
        that were launched last.
        """
        checksums = self.group.checksums
        if checksums is None:
            return
        checksums.launch()
        checksums.found(latest)
        spoiled = checksums.sealed.spoiled
        for block in (block for table in self.tables for block in table.blocks) if spoiled else ():
            if block in spoiled:
                self.torn = True
                raise CorruptedBlock.of(
                    spoiled[block], "the answer", "the call has ended and the cache cannot be used any more"
                )

    # ---- prefixes

    def begin_with(self, found: Sequence[Match], columns: int, more: int) -> None:
        """Begin every row with what the pool holds of it, `columns` columns in all; `more` columns follow.

        What the rows held before is given back; on failure they are empty.
        """
        with self.group.memory.lock:
            self.columns = 0
            self._open(len(found))
            try:
                with self._whole():
                    for table, match in zip(self._tables, found, strict=True):
                        adopt(table, match)
                self.group.refuse_hopeless(self.expected_columns, self._row_blocks(columns + more))
                held = sum(len(table.blocks) for table in self._tables)
                hint = max(0, self._hint(len(found), columns + more) - held)
                self.group.make_room(sum(match.partial is not None for match in found), hint)
                if all(
                    len(table.blocks) <= (match.partial is not None)
                    for table, match in zip(self._tables, found, strict=True)
                ):
                    self._lay_out()
                with self._whole():
                    copies = detach(self._tables)
                    self._check_bytes()
                    if copies:
                        self.group.copy(copies)
            except BaseException:
                self.free()
                raise
            self.columns = columns
            self._cut = columns
            self._keep_strided(look_closely=True)
            if self._strided is None and self.starts is None:
                self._find_strided()
            self._changed()

    def commit(self, tokens: Sequence[Sequence[int]], extras: Sequence[bytes], dedupe: bool) -> None:
        """Let other rows begin with what these hold: tokens [rows][columns], padding included, and the extras
        that their keys and values depend on.

        With `dedupe` blocks that hold the same as cached ones are replaced by those.
        """
        with self.group.memory.lock:
            with self._whole():
                for i, table in enumerate(self.tables):
                    own = tokens[i][self.starts[i] if self.starts is not None else 0 :]
                    commit(table, own, extras[i], keep_tokens=True, dedupe=dedupe)
                    commit_tail(table, own, extras[i])
            self.group.check_bytes()
            self._keep_strided(look_closely=True)
            self._changed()

    def _find_strided(self) -> None:
        """Find out whether rows lie at equal distances: those that began with cached blocks, or some that
        remain.
        """
        size = self.group.pool.block_size
        firsts = [table.blocks[0] - table.released for table in self._tables if table.blocks]
        strides = {after - before for before, after in pairwise(firsts)} or {1}
        stride = strides.pop()
        if len(firsts) == len(self._tables) and not strides and stride > 0:
            self._strided = StridedView(firsts[0] * size, stride * size)
            self._keep_strided(look_closely=True)

    # ---- rows come, go and change places

    def reorder(self, sources: Sequence[int]) -> None:
        """Replace row i by row sources[i]: tables change, no tensor moves."""
        with self.group.memory.lock:
            if list(sources) == list(range(self.count)):
                return
            # Refused before anything changes: the rows stay as they are.
            check_sources(self._tables, sources)
            with self._whole():
                self._tables = reorder(self.tables, sources)
                if self.starts is not None:
                    self.begin_at([self.starts[source] for source in sources])
                lay_so = self._strided is not None and len(set(sources)) == len(sources)
                self._strided = None
                if lay_so:
                    self._find_strided()
                self._changed(stamp=Reorder(self.stamp, sources))

    def crop(self, columns: int) -> None:
        """Drop the last `columns` columns; with a window, also what no later step can see."""
        if not 0 <= columns <= self.columns:
            raise ValueError(
                f"cannot take {columns} tokens from a cache of {self.columns}; give 0 to {self.columns}"
            )
        left = self.columns - columns
        self.return_to(left, self.starts if left else None)

    def return_to(self, columns: int, starts: list[int] | None) -> None:
        """Go back to an earlier state: `columns` columns, of which row i begins at starts[i]."""
        with self.group.memory.lock:
            lengths = [max(0, columns - start) for start in starts or [0] * self.count]
            self._check_past(lengths)
            with self._whole():
                for table, length in zip(self.tables, lengths, strict=True):
                    if length:
                        table.crop(table.length - length)
                    else:
                        table.free()
                self.columns = self._cut = columns
                self.begin_at(starts)
                self._release()
                self._changed()

    def check_past(self, columns: int) -> None:
        """Raise if a crop of so many columns would make the window see blocks that were freed."""
        if columns not in (0, self.columns):
            self._check_past([max(0, length - columns) for length in self.lengths])

    def _check_past(self, lengths: Sequence[int]) -> None:
        """Raise if rows cut to these lengths would see blocks that were freed."""
        if not self.kind.releases:
            return
        for table, length in zip(self.tables, lengths, strict=True):
            if 0 < length < table.length and table.released > self.kind.reach(length, table.pool.block_size):
                raise RuntimeError(
                    f"cannot go back {table.length - length} tokens: a window of {self.kind.window} tokens "
                    "was reached and the past was given back; call activate_past_recording() before "
                    "generating"
                )

    def fork(self) -> Rows:
        """A second set of rows over the same blocks; no tensor moves."""
        with self.group.memory.lock:
            self.require_whole()
            self._room = 0
            twin = type(self)(self.group)
            suspect = self.group.memory.suspect
            self.group.memory.suspect = True
            twin._tables = [table.fork() for table in self.tables]
            self.group.memory.suspect = suspect
            twin.starts = None if self.starts is None else list(self.starts)
            twin.columns = self.columns
            twin.expected_columns = self.expected_columns
            twin._keep_past = self._keep_past
            twin._cut = self._cut
            twin._strided = self._strided
            return twin

    def free(self) -> None:
        """Free every block; the rows are empty and may be used again."""
        with self.group.memory.lock:
            suspect = self.group.memory.suspect
            self.group.memory.suspect = True
            for table in self.tables:
                table.free()
            self.group.memory.suspect = suspect
            self._tables = []
            self.starts = None
            self.columns = 0
            self._strided = None
            self.torn = False
            self._cut = 0
            self._changed()


def _sources(stamp: object, earlier: object, count: int) -> Sequence[int] | None:
    """The row that each of `count` rows was at an earlier stamp, whose blocks it still begins with; None if
    other changes than one reorder came between.
    """
    if stamp is earlier:
        return range(count)
    return stamp.sources if isinstance(stamp, Reorder) and stamp.before is earlier else None


def other_rows(held: int, given: int) -> ValueError:
    """The error of a batch that has not the rows of the cache which it continues."""
    return ValueError(
        f"this cache holds {held} rows and was given {given}; use a new cache for another batch, or "
        "batch_repeat_interleave() and batch_select_indices() of this one first"
    )
