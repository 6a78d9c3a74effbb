"""Tensors of a step on their way between host and device: the index tensors of a captured one, which are the
same at every replay with other content, and copies of its answer.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from ..blocks import BlockTable, BlockTableArray, Copy, SharedReads
from ..blocks.shared_reads import FIELDS
from .batch import Batch
from .ordinary import ordinary_tensors

GROUPS = "groups"
"""The part of an upload that has the groups of rows that read common blocks together."""
BUFFERS = 2
"""Staging buffers that take turns, so that the host fills one while the device still reads the other."""
PIECE = 2**21
"""Numbers that are locked at once: 8 MiB."""
LINE = 16
"""Buffers begin at multiples of so many numbers."""
_taking = threading.Lock()
_left = torch.empty(0, dtype=torch.int32, device="cpu")
"""The unused rest of the last piece."""


def tokens_of(
    rows: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], counts: array[int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """For every token its row and its position, [tokens] each, where row i has counts[i] after starts[i]."""
    many = np.asarray(counts)
    firsts = many.cumsum() - many
    return rows.repeat(many), np.arange(many.sum()) + (starts - firsts).repeat(many)


def staging(count: int, device: torch.device) -> torch.Tensor:
    """Zeros on the host, which are copied to a device. Locking memory for a GPU takes milliseconds, so many
    batches have parts of one piece; a larger batch has memory of its own, which ends with it.
    """
    global _left
    if device.type != "cuda" or count > PIECE:
        return torch.zeros(count, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    room = -(-count // LINE) * LINE
    with _taking:
        if len(_left) < room:
            _left = torch.zeros(PIECE, dtype=torch.int32, device="cpu", pin_memory=True)
        taken, _left = _left[:count], _left[room:]
    return taken


class UploadPart(NamedTuple):
    """One of the tensors that an upload consists of. Those of 64 bits come first."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32
    empty: int | None = None
    """The number of all entries that an upload does not write; None if they may hold any."""

    @property
    def size(self) -> int:
        """Its share of a buffer of 32-bit numbers."""
        return math.prod(self.shape) * self.dtype.itemsize // torch.int32.itemsize


class StagedTensors:
    """Tensors on a device that the host fills in one upload: parts of one buffer, found by name.

    Staging buffers on the host take turns, so that one is filled while the device still reads the other.
    """

    def __init__(self, parts: Sequence[UploadPart], device: torch.device) -> None:
        size = -(-sum(part.size for part in parts) // LINE) * LINE
        with ordinary_tensors():
            self.data = torch.zeros(size, dtype=torch.int32, device=device)
            """All parts, one behind the other."""
            self.staging = staging(BUFFERS * size, device).split(size)
            views = [_divided(buffer, parts) for buffer in self.staging]
            self.parts = _divided(self.data, parts)
        self._views = [{name: part.numpy() for name, part in each.items()} for each in views]
        self._empty = [(part.name, part.empty) for part in parts if part.empty is not None]
        self._events: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._turn = 0
        self.latest = self._views[self._turn]
        """The parts on the host as they were uploaded last, where no later upload has written."""

    @contextmanager
    def filled(self) -> Iterator[dict[str, Any]]:
        """Upload what is written meanwhile into the parts of a staging buffer, as numpy's arrays."""
        self._turn = (self._turn + 1) % BUFFERS
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()  # two uploads ago: long done
        views = self._views[self._turn]
        for name, number in self._empty:
            views[name].fill(number)
        yield views
        self.latest = views
        self.data.copy_(self.staging[self._turn], non_blocking=True)
        if self.data.is_cuda:
            event = self._events[self._turn] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.data.device))


def _divided(buffer: torch.Tensor, parts: Sequence[UploadPart]) -> dict[str, torch.Tensor]:
    """The parts of a buffer, by name."""
    sizes = [part.size for part in parts]
    pieces = buffer[: sum(sizes)].split(sizes)
    return {
        part.name: piece.view(part.dtype).view(part.shape) for part, piece in zip(parts, pieces, strict=True)
    }


def download(tensors: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
    """Launch copies of tensors of one device to the host; the answer waits for all of them and has them."""
    if not (tensors and tensors[0].is_cuda):
        return lambda: tensors
    copies = [
        torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=True).copy_(
            each, non_blocking=True
        )
        for each in tensors
    ]
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensors[0].device))

    def wait() -> list[torch.Tensor]:
        event.synchronize()
        return copies

    return wait


def fill_groups(parts: dict[str, Any], groups: array[int]) -> None:
    """Write groups of rows, as `SharedReads.follow` answers them, into the parts of an upload."""
    parts[GROUPS].reshape(-1)[: len(groups)] = groups


class StaticBatch(Batch):
    """The contents of a `RowBatch` in static tensors, for at most `rows` rows of at most `width` blocks.

    `begin` is the first operation of every run and part of the capture: it computes where the new tokens are
    written and advances the lengths, all on the device. The host uploads a step (`load`) only when something
    changed that the device cannot know: a new block, a copy, rows that changed places. Rows beyond those that
    were loaded write nothing and see nothing.
    """

    captured = True

    def __init__(
        self,
        rows: int,
        new: int,
        width: int,
        block_size: int,
        columns: int,
        device: torch.device,
        window: int | None = None,
        shared: SharedReads | None = None,
    ) -> None:
        """shared: the books of rows that read common blocks together."""
        self.shared = shared
        self.rows = rows
        self.new = new
        self.longest = new
        self.width = width
        self.block_size = block_size
        self.device = device
        self.window = window
        """Blocks that it has passed may have been freed: none of their contents is read, masked or not."""
        self.columns = columns
        """About how many columns there are, to choose tilings for; exact where no tokens are added (an
        encoder's).
        """
        self.stamp: object = None
        """The stamp of the rows whose step the device holds."""
        self.step = None
        self.workspace = {}
        self._visible: dict[tuple[torch.device, int | None], torch.Tensor] = {}
        self._elsewhere: dict[tuple[torch.device, int], torch.Tensor] = {}
        """Tensors of the step for layers on other devices, by device and the id of the tensor here."""
        sequences, *_ = next(part.shape for part in self._parts() if part.name == "table")
        groups = [UploadPart(GROUPS, (sequences, FIELDS), empty=0)] if shared is not None else []
        self.uploaded = StagedTensors([*self._parts(), *groups], device)
        """The step as the host has uploaded it."""
        self.tokens = self.uploaded.parts["tokens"]
        with ordinary_tensors():
            self.seen = torch.zeros(rows, dtype=torch.int32, device=device)
            """The tokens of every row with this step's; 0 for a missing row."""
            self._targets_of_step = torch.full((rows * new,), -1, dtype=torch.long, device=device)

    def _parts(self) -> list[UploadPart]:
        """The parts of an upload: the columns before and after the step, the blocks of every row and its
        tokens before the step (-1: the row is not in use), the blocks that are copied and where to.
        """
        return [
            UploadPart("columns", (2,), torch.long),
            UploadPart("table", (self.rows, self.width)),
            UploadPart("tokens", (self.rows,), empty=-1),
            UploadPart("sources", (self.rows,)),
            UploadPart("targets", (self.rows,)),
        ]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that a captured step reads and writes."""
        return [self.uploaded.data, self.seen, self._targets_of_step]

    # ---- the host's part

    def load(
        self,
        tables: Sequence[BlockTable],
        new: int,
        columns: int,
        copies: Sequence[Copy] = (),
        sources: Sequence[int] | None = None,
    ) -> None:
        """Upload a step of `new` tokens that `tables` have taken already, as it was before it, at `columns`
        columns. sources: the rows of the last step here with whose blocks the tables begin, all but those of
        the new tokens; None if tables may name any blocks.
        """
        before = np.array([table.length for table in tables]) - new
        with self.uploaded.filled() as parts:
            parts["tokens"][: len(tables)] = before
            if sources is None or new != 1:
                ids = parts["table"].reshape(-1)
                for i, table in enumerate(tables):
                    begin = i * self.width + table.released
                    ids[begin : begin + len(table.blocks)] = table.blocks
            else:
                last = before // self.block_size
                ids = parts["table"][: len(tables), : last.max() + 1]
                ids[:] = self.uploaded.latest["table"][:, : ids.shape[1]].take(sources, 0)
                ids[np.arange(len(tables)), last] = [table.blocks[-1] for table in tables]
            parts["columns"].fill(columns)
            if copies:
                read, written = parts["sources"], parts["targets"]
                read[: len(copies)], written[: len(copies)] = zip(*copies, strict=True)
            if self.shared is not None:
                fill_groups(parts, self.shared.follow_tables(tables, new, sources))

    def load_array(
        self, tables: BlockTableArray, row_ids: array[int], starts: array[int], counts: array[int]
    ) -> None:
        """Upload a step in which row_ids[i] has taken counts[i] tokens after starts[i]; every token is a row
        here.
        """
        rows = np.asarray(row_ids)
        positions = np.asarray(starts)
        if len(rows) != np.asarray(counts).sum():
            rows, positions = tokens_of(rows, positions, counts)
        width = int(positions.max()) // self.block_size + 1
        blocks = np.asarray(tables.ids).reshape(tables.height, tables.width)
        with self.uploaded.filled() as parts:
            parts["tokens"][: len(rows)] = positions
            parts["table"][: len(rows), :width] = blocks.take(rows, 0)[:, :width]
            if self.shared is not None:
                fill_groups(parts, self.shared.follow_singles(tables, row_ids, starts, counts))

    def load_nothing(self) -> None:
        """Upload a step without tokens: a run writes nothing and sees nothing."""
        self.stamp = None
        with self.uploaded.filled():
            pass

    def copies(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `count` copies that were uploaded: blocks to read and blocks to write."""
        parts = self.uploaded.parts
        return parts["sources"][:count], parts["targets"][:count]

    # ---- the device's part, captured

    def begin(self, advance: Callable[..., None]) -> None:
        """Begin a run: see where the new tokens go, and count them. `advance` is that of the ops of captured
        steps.
        """
        self._begin()
        if not self.new:
            self.seen.copy_(self.tokens.clamp(min=0))
            return
        parts = self.uploaded.parts
        advance(
            parts["table"],
            self.tokens,
            self.seen,
            self._targets_of_step,
            parts["columns"],
            self.new,
            self.block_size,
        )

    def _begin(self) -> None:
        self.step = object()
        self._visible.clear()
        self._elsewhere.clear()

    def _on(self, device: torch.device, part: torch.Tensor) -> torch.Tensor:
        """A tensor of the step for the layers of a device, copied there once in a step."""
        if part.device == device:
            return part
        key = device, id(part)
        if key not in self._elsewhere:
            self._elsewhere[key] = part.to(device)
        return self._elsewhere[key]

    @property
    def before(self) -> torch.Tensor:
        """The columns before this step, a number on the device."""
        return self.uploaded.parts["columns"][0]

    def targets(self, device: torch.device) -> torch.Tensor:
        return self._on(device, self._targets_of_step)

    def written(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For plain torch: slots [rows * new], and the token that each takes. A row that is not there repeats
        what row 0 writes.
        """
        targets = self.targets(device)
        tokens = torch.where(targets >= 0, torch.arange(self.rows * self.new, device=device), 0)
        return targets[tokens], tokens

    def table(self, device: torch.device) -> torch.Tensor:
        return self._on(device, self.uploaded.parts["table"])

    def lengths(self, device: torch.device) -> torch.Tensor:
        return self._on(device, self.seen)

    def groups_on(self, device: torch.device) -> torch.Tensor | None:
        groups = self.uploaded.parts.get(GROUPS)
        return None if groups is None else self._on(device, groups)

    def slots(self, first: int, device: torch.device) -> torch.Tensor:
        """For plain torch: the slot [rows, positions] of every position, outside what a row sees that of the
        nearest token inside.
        """
        length = self.lengths(device).long()[:, None]
        position = torch.arange(self.positions, device=device).expand(self.rows, -1)
        inside = torch.minimum(position, length - 1).clamp(min=0)
        if self.window is not None:
            inside = torch.maximum(inside, length - self.new - self.window + 1)
        blocks = self.table(device).long().gather(1, inside // self.block_size)
        return blocks * self.block_size + inside % self.block_size

    def visible(self, first: int, window: int | None, device: torch.device) -> torch.Tensor:
        """For plain torch: which positions each new token sees, [rows, 1, new, positions]."""
        key = device, window
        if key not in self._visible:
            position = torch.arange(self.positions, device=device)
            last = self.lengths(device).long()[:, None]
            query = (last - self.new + torch.arange(self.new, device=device))[:, :, None]
            seen = position <= query
            if window is not None:
                seen = seen & (position > query - window)
            self._visible[key] = seen[:, None]
        return self._visible[key]

    @property
    def positions(self) -> int:
        """All that may ever be used; for an encoder, whose length is fixed, exactly those."""
        return self.width * self.block_size if self.new else self.columns
