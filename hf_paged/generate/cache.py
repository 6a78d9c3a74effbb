"""The cache that stock generate() decodes on."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from ..blocks import LayerKind, Numbers
from ..kv import Arithmetic, Sequences
from ..kv.config import CacheConfig
from ..model.layer import DIFFER, PagedLayer
from ..model.lazy import Path
from ..model.offloaded import input_device
from ..model.ranks.tensor_parallel import mesh_of
from ..model.registry import base_model, end_forwards, memory_of
from ..model.routing import RoutingRecord
from ..model.slots import NO_CONTENT, Slot, beside, slots_of
from ..model.state_functions import WITHOUT_PAST, StateFunctions
from ..model.state_layers import KeepsStates, RowStates
from ..model.state_slots import rows_at, states_of
from .ended import EndedRows
from .picture import block_map
from .prefix_reuse import Reuse
from .prompt_snapshots import rows_of_states

OutsideContent = list[tuple[Any, dict[str, Any]]]
"""Layers, or a cache itself, and what each keeps outside the pages, by name."""


class Mark(NamedTuple):
    """Where a cache was before a step."""

    columns: dict[LayerKind, int]
    initialized: list[bool] | None
    """Which paged layers were initialized; None where all rows held something."""
    starts: list[int] | None
    """The column at which each row begins."""
    outside: OutsideContent | None
    """The content outside the pages; None where a step that fails loses it, as saving it takes a copy."""
    numbers: Numbers
    """The numbers of the rows."""


class PagedCache(DynamicCache):
    """A key-value cache in blocks, for `model.generate(..., cache=PagedCache(model))` and for plain
    forwards.

    Layers that attend to everything or to a window are paged, and recurrent states lie in slots; any other
    layer stays as stock makes it. Rows share blocks after a fork and copy a block only when one of them
    writes to it: `reorder_cache`, `copy.deepcopy` and `batch_*` change tables and move no tensor.
    """

    reuse: Reuse | None
    """Prefix reuse of this cache, if it is enabled."""
    sequences: Sequences
    """The rows of its own layers."""
    cross: PagedCache | None
    """The layers that attend to another sequence than the text (a picture's tokens), with tables of their
    own; None if none does.
    """
    go_back: ClassVar[Callable[[PagedCache, int], None]]
    """Hold the first columns, where layers have no states behind them. It calls the model on a cache."""

    def __init__(
        self,
        model: nn.Module,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_fraction: float | None = None,
        kernels: str = "auto",
        graphs: bool = True,
        prefix_caching: bool = False,
        salt: str = "",
        verify: str | None = None,
        keep_pools: bool | None = None,
        state_slots: int | None = None,
        state_snapshots: int | None = None,
        state_every: int = 512,
        state_dtype: str | None = None,
        drop_ended: str = "auto",
        shared_reads: str = "auto",
    ) -> None:
        config = CacheConfig(
            block_size, num_blocks, memory_fraction, kernels, graphs, prefix_caching, salt, verify,
            keep_pools, state_slots=state_slots, state_snapshots=state_snapshots, state_every=state_every,
            state_dtype=state_dtype, drop_ended=drop_ended, shared_reads=shared_reads,
        )  # fmt: skip
        self._open(base_model(model), config, cross=False)

    @classmethod
    def make(cls, model: Any, config: CacheConfig, *, cross: bool = False, slots: Any = None) -> PagedCache:
        """A cache under checked options; `cross`: of what a decoder sees of an encoder; slots: its places."""
        cache = cls.__new__(cls)
        cache._open(model, config, cross, slots)
        return cache

    def _open(self, model: nn.Module, config: CacheConfig, cross: bool, known: Any = None) -> None:
        slots: list[Slot] = known or slots_of(model, cross)
        counts = Counter(kind for slot in slots for kind in slot.kinds)
        memory = memory_of(model)
        total = sum(counts.values())
        arithmetic = Arithmetic.of(model, input_device(model))
        groups = {
            kind: memory.group(kind, config, count, count / total, arithmetic)
            for kind, count in counts.items()
        }
        for group in groups.values():
            group.kept = config.keep_pools
            group.verify_bytes(config.verify == "bytes", by_call=mesh_of(model) is not None)
        own_cross = None
        reference = weakref.ref(model)
        across = {kind: group for kind, group in groups.items() if not kind.grows and not cross}
        if across:
            groups = {kind: group for kind, group in groups.items() if kind.grows}
            own_cross = PagedCache.__new__(PagedCache)
            own_slots = [slot for slot in slots if slot.kind in across]
            own_cross._adopt(Sequences(memory, across), own_slots, reference, config)
        self._adopt(Sequences(memory, groups), slots, reference, config, own_cross)
        if config.prefix_caching and not cross:
            self.reuse = Reuse(self.sequences, config)

    def _adopt(
        self,
        sequences: Sequences,
        slots: list[Slot],
        model: weakref.ref[nn.Module],
        config: CacheConfig,
        cross: PagedCache | None = None,
    ) -> None:
        """Take `sequences` as this cache's own: they are freed when the cache is gone.

        Layers of cross attention use those of `cross`.
        """
        across = {} if cross is None else cross.sequences.rows
        cross_layers = iter(() if cross is None else cross.layers)
        layers = [
            slot.open(i, sequences) if slot.kind not in across else next(cross_layers)
            for i, slot in enumerate(slots)
        ]
        Cache.__init__(self, layers=layers)
        self.paged_layers = [layer for layer in layers if isinstance(layer, PagedLayer)]
        self.own_layers = [layer for layer in self.paged_layers if layer.sequences is sequences]
        """The paged layers that hold the tokens of `sequences`: all but those that attend across."""
        self.sequences = sequences
        self.config = config
        self.cross = cross
        self._model = model
        self.reuse = None
        self.mask_read = False
        """True once the running call has read its attention mask on the host."""
        self.prompt_in_chunks = False
        """True if the running call feeds its prompt in several forwards."""
        self.ended: EndedRows | None = None
        """The rows of the running call that have ended; None if all stay to its end."""
        known_model = model()
        if sequences.states is not None:
            functions = None
            if known_model is not None:
                functions = StateFunctions(known_model, WITHOUT_PAST)
                end_forwards(known_model)
            states = RowStates(sequences, sequences.states, functions)
            for layer in layers:
                if isinstance(layer, KeepsStates) and layer.complete:
                    layer.keep_in_slots(states)
        self.states = states_of(layers)
        """The recurrent states that layers keep in slots; None if none does."""
        self.routing: RoutingRecord | None = None
        """The record of its tokens' experts, if the call returns it."""
        if config.return_routing and known_model is not None and self.own_layers:
            self.routing = RoutingRecord(known_model, self.own_layers)
        self.torn = False
        """True if a step broke off after it may have advanced states: their content is not known."""
        self._has_beside = not self.complete
        self._names = frozenset(vars(self)) | {"_names"}
        """The attributes of a cache to which no model has bound anything."""
        weakref.finalize(self, sequences.memory.abandon, sequences).atexit = False

    # ---- what it is

    @property
    def model(self) -> nn.Module | None:
        """The model whose pools hold the blocks."""
        return self._model()

    @property
    def complete(self) -> bool:
        """True if pages hold everything the cache keeps: no layer has another state."""
        return all(map(_is_complete, self.layers))

    def outside(self) -> OutsideContent:
        """Each layer with more than keys and values, and what it keeps outside the pages, by name; then the
        cache itself, and what a model has bound to it.
        """
        kept = [(layer, beside(layer)) for layer in self._layers_of_rows() if not _is_complete(layer)]
        bound = {name: value for name, value in vars(self).items() if name not in self._names}
        return [*kept, (self, bound)]

    @property
    def paths(self) -> list[Path | str]:
        """How attention last read each layer: "paged", "dense" (through a dense copy), "unused", or
        "stock".
        """
        return [layer.path if isinstance(layer, PagedLayer) else "stock" for layer in self.layers]

    def tables(self, layer: int = 0) -> list[list[int]]:
        """The blocks of every row, as paged layer number `layer` sees them; of recurrent layers alone, the
        slots.
        """
        self.settle()
        if not self.paged_layers and self.sequences.states is not None:
            return [list(table.blocks) for table in self.sequences.states.tables]
        found = self.paged_layers[layer]
        return [list(table.blocks) for table in found.sequences.tables(found.kind)]

    @property
    def is_compileable(self) -> bool:
        """False: our captures take the place of compiled steps."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """Stock's answer by layer. False for recurrent layers without others: they have a length here, and
        stock takes so many tokens off its input.
        """
        return list(super().is_linear) if self.own_layers else [False] * len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The tokens that the cache holds. Recurrent layers count none: without others, those that their
        states cover.
        """
        return super().get_seq_length(layer_idx) if self.own_layers else self.sequences.columns

    def __repr__(self) -> str:
        rows = self.sequences.count
        tokens = self.sequences.columns
        size = self.config.block_size
        return f"PagedCache(rows={rows}, tokens={tokens}, block_size={size}, layers={len(self)})"

    def _repr_html_(self) -> str:
        cross = None if self.cross is None else self.cross.sequences
        found = block_map(self.sequences, cross, self.config.block_size)
        return found.picture(repr(self), noun="row")

    # ---- rows

    @property
    def lengths(self) -> list[int]:
        """The tokens of each row, padding not counted."""
        self.settle()
        return self.sequences.lengths

    @contextmanager
    def taking(self, counts: Sequence[int]) -> Iterator[None]:
        """Have row i take counts[i] of the columns of a forward inside: its last ones. Others are not stored.

        For loops of your own in which rows advance by different numbers of tokens. The attention_mask of a
        row is 1 for the last `lengths[i] + counts[i]` columns.
        """
        if not self.complete or self.states is not None:
            raise ValueError(
                "layers of this cache keep more than keys and values, which every column changes; give each "
                "row a cache of its own"
            )
        self.settle()
        with self.sequences.taking(counts):
            yield

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row i by row beam_idx[i]. Tables are forked, no tensor moves."""
        self.settle()
        self.sequences.reorder(beam_idx)
        self._reorder_others(beam_idx)
        if self.cross is not None:
            self.cross.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int | torch.Tensor) -> None:
        """Fork every row into `repeats` rows, or row i into repeats[i]."""
        self.settle()
        rows = torch.arange(self.sequences.count, device="cpu")
        if len(rows):
            repeats = repeats.cpu() if isinstance(repeats, torch.Tensor) else repeats
            self._select(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows `indices`, in that order: all that can index the rows of a tensor."""
        self.settle()
        rows = torch.arange(self.sequences.count, device="cpu")
        if not len(rows):
            return
        picked = rows[indices.cpu() if isinstance(indices, torch.Tensor) else indices, ...]
        if picked.ndim != 1:
            raise IndexError(
                f"batch_select_indices got {indices!r}, expected a list of rows; a single row i is [i]"
            )
        self._select(picked)

    def _select(self, index: torch.Tensor) -> None:
        """Make row i what row index[i] was, in every layer. A cache that is left without rows is empty."""
        if len(index):
            self.sequences.select(index.tolist())
        else:
            self.sequences.free()
        self._reorder_others(index)
        self._follow_rows()
        if self.cross is not None and self.cross.sequences.count:
            self.cross._select(index)

    def settle(self) -> None:
        """Apply delayed operations of the rows, in every layer."""
        with self.sequences.memory.lock:
            for part in paged_parts(self):
                part.sequences.flush()
            self.spread()

    def spread(self) -> None:
        """Fork the rows that stand for several, in every layer."""
        sources = self.sequences.sources
        if sources is not None:
            self.hold(range(len(sources)), None)
        if self.cross is not None:
            self.cross.spread()

    def hold(self, rows: Sequence[int], sources: list[int] | None) -> None:
        """Hold these rows of the call from now on, in every layer. sources: which of them stands for each row
        of the call; None if each does for itself.
        """
        held = self.sequences.count
        places = self.sequences.hold(rows, sources)
        if held:
            self._reorder_others(torch.tensor(places, device="cpu"))

    def activate_past_recording(self) -> None:
        """Keep what a crop needs: windows keep their past, and recurrent layers the inputs of a step."""
        super().activate_past_recording()  # type: ignore[no-untyped-call]
        self.states = states_of(layer for layer in self.layers if getattr(layer, "complete", False))
        self._has_beside = not self.complete

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last |tokens_to_remove| tokens; a positive number is the length to keep, as it once was.

        They are tokens of the text: what layers attend to across stays.
        """
        columns = self.sequences.columns
        count = int(tokens_to_remove)
        count = max(0, columns - count) if count > 0 else -count
        kept = max(0, columns - count)
        if self.states is not None and not all(rows.holds(kept) for rows in rows_of_states(self.sequences)):
            self.go_back(kept)
            return
        with self.sequences.changing_all():
            self.sequences.check_past(min(count, columns))
            for layer in self._layers_of_rows():
                layer.crop(-count)
            self.sequences.crop(min(count, columns))
        self._follow_rows()

    def reset(self) -> None:
        """Free every block; the cache is empty afterwards."""
        self.sequences.free()
        with self.sequences.changing_all():
            for layer in self._layers_of_rows():
                layer.reset()
        self.torn = False
        if self.cross is not None:
            self.cross.reset()
        if self.reuse is not None:
            self.reuse.leave()
            self.reuse = Reuse(self.sequences, self.config)

    def _reorder_others(self, index: torch.Tensor) -> None:
        """Apply a change of the tables to what layers keep outside the pages."""
        with self.sequences.changing_all():
            for layer in self._layers_of_rows():
                layer.reorder_cache(index)

    def _layers_of_rows(self) -> list[Any]:
        """All layers but those that attend across, whose rows are those of `cross`."""
        return [
            layer
            for layer in self.layers
            if not isinstance(layer, PagedLayer) or layer.sequences is self.sequences
        ]

    def _follow_rows(self) -> None:
        for layer in self.own_layers:
            layer.follow()

    def mark(self, repeats: bool = False) -> Mark:
        """The state of the cache before a step, for `roll_back`. repeats: whether the step may run again, for
        which states that layers hold in tensors of their own are copied.
        """
        if self.torn:
            raise RuntimeError(
                "a step of this cache failed after it may have advanced recurrent states, which cannot be "
                "taken back; use a new cache, or reset() this one and begin with the whole prompt"
            )
        columns = self.sequences.positions
        begins = not all(columns.values())
        initialized = [layer.is_initialized for layer in self.own_layers] if begins else None
        starts, numbers = self.sequences.starts, self.sequences.numbers
        return Mark(columns, initialized, starts, self._outside_before(repeats), numbers)

    def _outside_before(self, repeats: bool) -> OutsideContent | None:
        """The content outside the pages before a step; None if only a copy would keep it: stock's layers
        write their states in place.
        """
        if not self._has_beside and len(vars(self)) == len(self._names):
            return []
        outside = self.outside()
        if not repeats and any(has_tensors(kept) for owner, kept in outside if owner is not self):
            return None
        return [(owner, kept if owner is self else deepcopy(kept)) for owner, kept in outside]

    def _put_back(self, outside: OutsideContent) -> None:
        """Return to what was kept outside the pages; names that were added since are gone."""
        for owner, kept in self.outside():
            for name in kept:
                del owner.__dict__[name]
        for owner, kept in outside:
            owner.__dict__.update(kept)

    def roll_back(self, mark: Mark) -> None:
        """Undo a step that failed halfway: every group back to where it was, and content outside the pages. A
        cache whose states the step has advanced in place is of no use any more.
        """
        steps = rows_at(max(mark.columns.values(), default=0), self.sequences.count, 0)
        self.torn |= mark.outside is None or (self.states is not None and not self.states.may_run(steps))
        if mark.outside is not None:
            self._put_back(mark.outside)
        for kind, rows in self.sequences.rows.items():
            if rows.columns > mark.columns[kind] and not rows.torn:
                rows.return_to(mark.columns[kind], mark.starts)
        self.sequences.numbers = mark.numbers
        layers = self.own_layers
        for layer, initialized in zip(layers, mark.initialized or [True] * len(layers), strict=True):
            layer.is_initialized &= initialized
            layer.follow()

    def may_repeat(self, rows: int, new: int) -> bool:
        """True if the next step may run twice: no row advances a state in the slot that it reads. States in
        tensors of layers are copied for it.
        """
        if self.states is None:
            return True
        return self.states.may_repeat(rows_at(self.sequences.columns, rows, new))

    def begin_at(self, columns: int) -> None:
        """Notify the layers that their rows begin with `columns` cached columns."""
        for layer in self.own_layers:
            layer.columns = columns

    def require_even(self) -> None:
        """Raise if a step has passed by a layer that holds earlier tokens: its table counts tokens that were
        never written.
        """
        rows = self.sequences.rows
        for layer in self.own_layers:
            if layer.columns and layer.columns != rows[layer.kind].columns:
                raise RuntimeError(
                    f"layer {layer.number} holds {layer.columns} tokens and was given none of a step, after "
                    f"which the other layers hold {rows[layer.kind].columns}; {DIFFER}"
                )

    def follow(self) -> None:
        """Notify the layers of steps that their rows took in a replay, which calls no layer."""
        for layer in self.own_layers:
            if layer.is_initialized:
                layer.columns = self.sequences.rows[layer.kind].columns
                layer.path = "paged"

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A fork: the same blocks under new tables, copied only where one of the two writes."""
        self.settle()
        twin = PagedCache.__new__(PagedCache)
        memo[id(self)] = twin
        slots = [Slot.like(layer, memo) for layer in self.layers]
        cross = None if self.cross is None else self.cross.__deepcopy__(memo)
        twin._adopt(self.sequences.fork(), slots, self._model, self.config, cross)
        twin.reuse = None if self.reuse is None else self.reuse.fork(twin.sequences)
        twin.torn = self.torn
        for mine, theirs in zip(self.layers, twin.layers, strict=True):
            if isinstance(mine, PagedLayer) and isinstance(theirs, PagedLayer):
                theirs.continue_from(mine)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a PagedCache lives in its model's pools and cannot be pickled; save cache.to_dynamic() instead"
        )

    def to_dynamic(self) -> DynamicCache:
        """A stock cache with the same content, in tensors of its own."""
        self.settle()
        stock = DynamicCache()
        for i, layer in enumerate(self.layers):
            if isinstance(layer, PagedLayer) and layer.columns:
                assert layer.keys is not None and layer.values is not None
                stock.update(layer.keys.clone(), layer.values.clone(), i)
        return stock


def leaves_of(kept: Any) -> Iterator[Any]:
    """The values in what a layer keeps outside the pages."""
    if isinstance(kept, (dict, list, tuple)) and not isinstance(kept, torch.Size):
        for part in kept.values() if isinstance(kept, dict) else kept:
            yield from leaves_of(part)
    else:
        yield kept


def has_tensors(kept: Any) -> bool:
    """True if a tensor is among what a layer keeps outside the pages."""
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(kept))


def _is_complete(layer: Any) -> bool:
    """True if pages hold everything that the layer keeps."""
    return bool(getattr(layer, "complete", type(layer) in NO_CONTENT))


def paged_parts(cache: object) -> list[PagedCache]:
    """The paged caches in what a model calls its cache: the decoder's own first, then the cross
    attention's.
    """
    if isinstance(cache, EncoderDecoderCache):
        return [*paged_parts(cache.self_attention_cache), *paged_parts(cache.cross_attention_cache)]
    if not isinstance(cache, PagedCache):
        return []
    return [cache] if cache.cross is None else [cache, cache.cross]


@contextmanager
def keeping(parts: Sequence[PagedCache]) -> Iterator[None]:
    """Around a forward over caches: what it computes of their rows beside keys and values is kept, too."""
    with ExitStack() as kept:
        for part in parts:
            if part.states is not None:
                kept.enter_context(part.states.forward())
            if part.routing is not None:
                kept.enter_context(part.routing.forward())
        yield
