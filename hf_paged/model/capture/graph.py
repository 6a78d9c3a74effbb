"""One captured step of generate(): the forwards it stands for, what it reads, how its answer comes out."""

from __future__ import annotations

import weakref
from bisect import bisect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from ...blocks import COLUMNS, LayerKind
from ...kv import GroupBatches, LayerGroup, Rows, Sequences, StaticBatch
from ...kv.columns import StaticColumns
from ...kv.config import CacheConfig
from ...kv.ordinary import ordinary_tensors
from ..adapters.rows import StepAdapters
from ..cache_name import CACHE
from ..state_slots import SlotStates, rows_at
from .step import CapturedStep, Path, bucket_of, leaves, walk

LENGTHS = (1024, 4096, 8192)
"""Between these lengths kernels are tiled alike."""
SMALLEST_WIDTH = 16
"""Blocks of a row in the smallest static table; further ones are powers of two."""
WIDEST = 8192
"""Positions that plain torch may look at in every captured step, however few of them hold anything yet."""
PLAIN = (bool, int, float, str, torch.dtype, type(None))


class CapturedCache(Protocol):
    """A cache as captured steps need it."""

    sequences: Sequences

    @property
    def config(self) -> CacheConfig:
        """The options that its pools were made with."""

    @property
    def states(self) -> SlotStates | None:
        """The recurrent states that layers keep in slots."""

    @property
    def complete(self) -> bool:
        """True if pages and slots hold all that the model keeps."""

    def mark(self) -> Any:
        """Where it is before a step."""

    def roll_back(self, mark: Any) -> None:
        """Return to where it was."""

    def follow(self) -> None:
        """Update the layers after the rows have taken a step."""


class ReplayableStep(NamedTuple):
    """A forward that may be replayed."""

    arguments: dict[str, Any]
    lean: dict[str, Any]
    """The same without the attention mask: the tables say what it says."""
    mask: str
    """How padding was given: "none", "whole" (a mask without padding) or "padded"."""
    parts: Sequence[CapturedCache]
    rows: int
    new: int
    forward: Callable[..., Any]
    """The model's own forward, which other code may have replaced."""
    adapters: StepAdapters | None = None
    """The adapters of its rows, if the model has any."""


class _FromCaller(NamedTuple):
    """Stands in an answer for something of the caller's own: the cache, or an input that came through."""

    path: Path


class Graph(CapturedStep):
    """A captured step and the tensors that it reads and writes."""

    def __init__(
        self,
        bucket: int,
        inputs: dict[str, Any],
        batches: list[dict[LayerKind, StaticBatch]],
        columns: StaticColumns,
        tables: Sequence[torch.Tensor],
    ) -> None:
        """tables: those of adapters that kernels read."""
        self.bucket = bucket
        self.inputs = inputs
        self.batches = batches
        self.columns = columns
        self._tables = tables
        self.answer: Any = None
        """The forward's answer in static tensors, with places for what belongs to the caller."""
        self.filled: dict[int, weakref.ref[torch.Tensor]] = {}
        """Sources of an encoder's static tensors, by the ids of these, since the user's code ran."""

    @classmethod
    def prepare(cls, step: ReplayableStep, device: torch.device) -> Graph:
        """Static tensors for the step; device: where its inputs are."""
        bucket = rows_of_graph(step)
        batches = [
            {
                kind: static_batch(kind, rows, bucket, step.new, rows.group.device)
                for kind, rows in kinds_read(part)
            }
            for part in step.parts
        ]
        inputs = {
            name: _static(value, step.rows, bucket)
            for name, value in step.lean.items()
            if isinstance(value, (torch.Tensor, ModelOutput))
        }
        table = None if step.adapters is None else step.adapters.table
        columns = StaticColumns(COLUMNS.values(), bucket, bucket, device)
        return cls(bucket, inputs, batches, columns, () if table is None else table.tensors)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        yield from leaves(self.inputs)
        yield from self.columns.tensors.values()
        for batches in self.batches:
            for batch in batches.values():
                yield from batch.tensors

    @property
    def shared(self) -> Sequence[torch.Tensor]:
        return self._tables

    @property
    def bytes(self) -> int:
        return super().bytes + sum(tensor.nbytes for tensor in leaves(self.answer))

    # ---- inputs

    def stage(self, step: ReplayableStep) -> None:
        """Get ready for the step that the rows have just taken: the replay takes it once more."""
        for part, batches in zip(step.parts, self.batches, strict=True):
            for kind, batch in batches.items():
                part.sequences.rows[kind].stage(batch.new, batch)
        self.feed(step)

    def advance(self, step: ReplayableStep) -> None:
        """Let the rows take the step."""
        for part in step.parts:
            if part.states is not None:
                part.states.slots_of(rows_at(part.sequences.columns, step.rows, step.new))
        for part, batches in zip(step.parts, self.batches, strict=True):
            for kind, batch in batches.items():
                rows = part.sequences.rows[kind]
                if batch.new:
                    rows.advance(batch.new, batch)
                elif batch.stamp is not rows.stamp:
                    rows.stage(0, batch)

    def feed(self, step: ReplayableStep) -> None:
        """Give the graph the step's own arguments, for a run of it: a replay, or a forward in its place."""
        for part in step.parts:
            if part.states is not None:
                part.states.begin(rows_at(part.sequences.columns - step.new, step.rows, step.new))
        numbers = step.parts[0].sequences.numbers
        if numbers is not self.columns.loaded:
            self.columns.load(numbers)
        for name, target in self.inputs.items():
            self._fill(target, step.arguments[name])

    def _fill(self, target: Any, source: Any) -> None:
        if isinstance(target, (ModelOutput, tuple)):
            # What an encoder answered is large and the same at every step of a call.
            for (_, old), (_, new) in zip(walk(target), walk(source), strict=True):
                last = self.filled.get(id(old))
                if last is None or last() is not new:
                    self._fill(old, new)
                    self.filled[id(old)] = weakref.ref(new)
        elif source.shape == target.shape:
            target.copy_(source)
        else:
            target[: source.shape[0]].copy_(source)

    # ---- answers

    def keep(self, answer: Any) -> None:
        owners = {id(x): path for path, x in walk(self.inputs)}
        self.answer = _with_places(answer, owners)
        # Which dimension of other tensors carries rows is not known for other numbers of rows.
        self.holds_fewer = len(list(leaves(self.answer))) == 1

    def hand_out(self, step: ReplayableStep) -> Any:
        """The replay's answer, in tensors of its own: the next replay writes over the graph's."""
        return self._hand_out(self.answer, step)

    def _hand_out(self, value: Any, step: ReplayableStep) -> Any:
        if isinstance(value, torch.Tensor):
            if step.rows == self.bucket or value.ndim == 0 or value.shape[0] % self.bucket:
                return value.clone()
            # Routers flatten [rows, tokens]: their first dimension is a multiple of the rows.
            return value[: value.shape[0] // self.bucket * step.rows].clone()
        if isinstance(value, _FromCaller):
            found: Any = step.arguments
            for name in value.path:
                found = found[name]
            return found
        if isinstance(value, _PlacedOutput):
            return value.kind(**{name: self._hand_out(part, step) for name, part in value.parts.items()})
        if isinstance(value, (tuple, list)):
            return type(value)(self._hand_out(part, step) for part in value)
        return value


class _PlacedOutput(NamedTuple):
    """A ModelOutput with places in it."""

    kind: type[ModelOutput]
    parts: dict[str, Any]


def _with_places(value: Any, owners: dict[int, Path]) -> Any:
    if isinstance(value, Cache):
        return _FromCaller((CACHE,))
    if isinstance(value, torch.Tensor):
        return _FromCaller(owners[id(value)]) if id(value) in owners else value
    if isinstance(value, ModelOutput):
        return _PlacedOutput(type(value), {name: _with_places(part, owners) for name, part in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(_with_places(part, owners) for part in value)
    return value


@contextmanager
def standing(step: ReplayableStep, graph: Graph) -> Iterator[None]:
    """Let the caches answer from the graph's static tensors, and begin the step there."""
    for part, batches in zip(step.parts, graph.batches, strict=True):
        part.sequences.static = batches
        part.sequences.static_columns = graph.columns.tensors
    try:
        for part in step.parts:
            for kind, batch in part.sequences.static.items():  # type: ignore[union-attr]  # set a moment ago
                batch.begin(part.sequences.rows[kind].group.captured_ops.advance)
        yield
    finally:
        for part in step.parts:
            part.sequences.static = None
            part.sequences.static_columns = {}


# ---- what a graph is captured for


def signature(step: ReplayableStep, device: torch.device) -> Hashable:
    """Names, shapes and settings of the arguments; None if one cannot be a graph's input on `device`."""
    facts = []
    for name, value in step.lean.items():
        fact = (
            (type(value).__name__, id(type(value)))
            if isinstance(value, Cache)
            else _fact(value, step.rows, device)
        )
        if fact is None:
            return None
        facts.append((name, fact))
    return tuple(facts)


def _fact(value: Any, rows: int, device: torch.device) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        by_row = value.ndim > 0 and value.shape[0] == rows
        return (by_row, value.shape[by_row:], value.dtype) if value.device == device else None
    if isinstance(value, (ModelOutput, tuple)):
        parts = value.items() if isinstance(value, ModelOutput) else enumerate(value)
        facts = tuple((name, _fact(part, rows, device)) for name, part in parts)
        return None if any(fact is None for _, fact in facts) else (type(value).__name__, facts)
    return None


def rows_of_graph(step: ReplayableStep) -> int:
    """A bucket, or exactly the step's rows if their number is fixed."""
    return step.rows if has_fixed_rows(step) else bucket_of(step.rows)


def has_fixed_rows(step: ReplayableStep) -> bool:
    """True if positions of several axes come as [axes, rows, tokens], which rows cannot be added to."""
    positions = step.arguments.get("position_ids")
    return positions is not None and positions.ndim != 2


def groups_of(step: ReplayableStep) -> list[LayerGroup]:
    """The layers that a step reads."""
    pages = [rows.group for part in step.parts for _, rows in kinds_read(part)]
    states = [part.sequences.states for part in step.parts]
    return [*pages, *(rows.group for rows in states if rows is not None and rows.columns)]


def shapes(part: CapturedCache, new: int) -> Hashable:
    """The key of a graph in one cache: its pools, the width of the tables, the class of its length."""
    return part.config, tuple(
        (
            kind,
            columns
            if (columns := _fixed(kind, rows.columns))
            else (new, _width(rows, new), bisect(LENGTHS, rows.columns)),
        )
        for kind, rows in kinds_read(part)
    )


def too_wide(part: CapturedCache, new: int) -> bool:
    """True if a captured step would be slow: plain torch reads all that its tables have room for."""
    return any(
        rows.group.captured_ops.kernels is None and _width(rows, new) * rows.group.pool.block_size > WIDEST
        for _, rows in kinds_read(part)
    )


def kinds_read(part: CapturedCache) -> list[tuple[LayerKind, Rows]]:
    """The kinds of layers that a step reads; cross-attention holds nothing where no picture was given."""
    return [(kind, rows) for kind, rows in part.sequences.rows.items() if rows.columns and kind.fills]


def _fixed(kind: LayerKind, columns: int) -> int:
    """The columns of an encoder, which stay as they are; 0 for what grows."""
    return 0 if kind.grows else columns


def _width(rows: Rows, new: int) -> int:
    """Blocks of a row in the static table: a power of two that holds what the rows may become."""
    blocks = rows.group.pool.blocks_for(max(rows.expected_columns, rows.columns) + new)
    return max(SMALLEST_WIDTH, 1 << (blocks - 1).bit_length())


def static_batch(kind: LayerKind, rows: Rows, bucket: int, new: int, device: torch.device) -> StaticBatch:
    """The static tensors of one kind of layers for a step of `new` tokens of each of `bucket` rows."""
    fixed = _fixed(kind, rows.columns)
    width = rows.group.pool.blocks_for(fixed) if fixed else _width(rows, new)
    return GroupBatches(rows.group, captured=True).static(
        bucket, width, new=0 if fixed else new, columns=rows.columns, device=device
    )


def _static(value: Any, rows: int, bucket: int) -> Any:
    """A tensor to be filled at every replay, with room for all rows of the bucket."""
    if isinstance(value, ModelOutput):
        return type(value)(
            **{name: _static(part, rows, bucket) for name, part in value.items() if part is not None}
        )
    if isinstance(value, tuple):
        return tuple(_static(part, rows, bucket) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    with ordinary_tensors():
        shape = (bucket, *value.shape[1:]) if value.ndim and value.shape[0] == rows else value.shape
        return torch.zeros(shape, dtype=value.dtype, device=value.device)
