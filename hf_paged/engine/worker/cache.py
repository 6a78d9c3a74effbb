"""The cache with which the engine runs one step: it refers to the step's pages and keeps nothing."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from ...blocks import LayerKind
from ...kv import Batch, LayerGroup, Sequences
from ...model.layer import PagedLayer
from ...model.lazy import LazyTensor
from ...model.servable import Unservable
from ...model.slots import Slot, take_over
from ...model.state_layers import KeepsStates, StateLayer
from .pools import Pools
from .states import SequenceStates

UNREADABLE = "the engine's cache of one step has no keys and values to read; use generate()"


class StepCache(DynamicCache):
    """The cache that a model is given. The tables belong to the scheduler, which has entered the step's
    tokens already.
    """

    def __init__(self, pools: Pools, slots: Sequence[Slot] | None = None) -> None:
        """slots: the places of a twin's layers, of which there may be more than the model's own."""
        self.pools = pools
        self.sequences = Sequences(pools.memory, {})
        """Without rows: the part of a cache that masks and attention use besides its pages."""
        self.reuse = None
        """The scheduler decides what may be shared."""
        self.batches: Mapping[LayerKind, Batch] = {}
        self.past = 0
        """The tokens before the step, where one sequence runs by itself."""
        self.cross_tokens = 0
        """Tokens that the sequence attends to across, if these are in the pages before the step."""
        layers = [self._layer(i, slot) for i, slot in enumerate(slots or pools.slots)]
        Cache.__init__(self, layers=layers)
        self.states: SequenceStates | None = None
        """The recurrent states of the sequences, if layers keep any."""
        for place, group in enumerate(pools.never_full.values(), len(pools.paged)):
            self.states = SequenceStates(self.sequences, group, place)
            for layer in layers:
                if isinstance(layer, KeepsStates):
                    layer.keep_in_slots(self.states)
        self._cross = DynamicCache()
        encoded: list[Any] = [StepLayer(i, kind, self) for i, kind in enumerate(pools.encoded)]
        Cache.__init__(self._cross, layers=encoded)

    def _layer(self, number: int, slot: Slot) -> Any:
        """The layer of a place; one that keeps nothing is stock's."""
        if slot.kind is None:
            return slot.source
        if not slot.kind.fills:
            return slot.open(number, self.sequences)
        made: Any = step_class(slot.paged) if slot.kind.grows else OwnCrossLayer
        layer: PagedLayer = made(number, slot.kind, self)
        if issubclass(made, KeepsStates):
            take_over(layer, slot.source)
        return layer

    def with_encoder(self, filled: bool) -> EncoderDecoderCache:
        """The same with what the decoder attends to in its encoder; filled: whether that lies in the pages
        already.
        """
        both = EncoderDecoderCache(self, self._cross)
        both.is_updated = dict.fromkeys(range(len(self._cross.layers)), filled)
        return both

    def begin(self, batches: Mapping[LayerKind, Batch], past: int = 0, cross_tokens: int = 0) -> None:
        """Describe another step, of one sequence after `past` tokens or of several in one row.
        cross_tokens: those of its pictures whose keys and values are in the pages.

        Until it is updated a layer is initialized if there is a past: models use that to recognise a prompt.
        Of several sequences some may be at their prompt, so none of the layers is.
        """
        self.batches = batches
        self.past = past
        self.cross_tokens = cross_tokens
        for layer in self.layers:
            if not isinstance(layer, StateLayer):
                layer.reset()

    @property
    def paths(self) -> set[str]:
        """How attention has read the layers in this step."""
        return {layer.path for layer in self.layers if isinstance(layer, StepLayer) and layer.kind.grows}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "the cache of an engine's step lives in its model's pools and cannot be pickled or copied"
        )


def _unreadable() -> torch.Tensor:
    raise RuntimeError(UNREADABLE)


class StepLayer(PagedLayer):
    """Writes a step's tokens where the plan says, and returns a view of the pages."""

    def __init__(self, number: int, kind: LayerKind, step: StepCache) -> None:
        super().__init__(number, kind, step.sequences)
        self.step = step

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys [rows, heads, new, key_dim] and values, and return everything that the new tokens
        may attend to.
        """
        if self.sequences.static is not None:
            return self._captured(key_states, value_states)
        self.group.look_at(self.number, key_states, value_states)
        pages = self._pages()
        pages.ops.write(pages, key_states, value_states)
        self.columns = pages.batch.columns
        self.is_initialized = True
        self.dtype = key_states.dtype
        self.device = key_states.device
        return self._pair(pages, key_states, value_states)

    @property
    def group(self) -> LayerGroup:
        return self.step.pools.groups[self.kind]

    @property
    def _step(self) -> Batch:
        return self.step.batches[self.kind]

    def _stored(self, which: Any) -> torch.Tensor | None:
        """The past of the one sequence of the step, of which only the shape is known; models read
        its length. What it attends to across is read whole.
        """
        if not self.kind.grows:
            return self._past(self._pages(), which)
        if self.sequences.static is not None and not self.kind.releases:
            return self._past(self._pages(), which)  # only the device knows its columns
        if not self.step.past:
            raise RuntimeError(UNREADABLE)
        store, index = self.group.store(self.number)
        data = store.of_layer[index][which == "values"]
        shape = (1, data.shape[1], self.step.past, data.shape[2])
        return LazyTensor(shape, data.dtype, data.device, _unreadable)

    def get_seq_length(self) -> int:
        """The tokens before the step; undefined for a row of several sequences."""
        return self.step.past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns a step of `query_length` tokens sees, and the first of them."""
        past = self.step.past
        kept = self.kind.kept(past)
        return kept + query_length, past - kept

    def reset(self) -> None:
        self.columns = 0
        self.path = "unused"
        self.is_initialized = self.step.past > 0


@functools.cache
def step_class(paged: type[PagedLayer]) -> type[StepLayer]:
    """The class of a step's layer where generate() has `paged`: recurrent states beside pages stay there."""
    if not issubclass(paged, KeepsStates):
        return StepLayer
    namespace = {"__module__": __name__, "__doc__": StepLayer.__doc__, "record_past": False}
    return type(f"Step{paged.__name__}", (StepLayer, paged), namespace)


class OwnCrossLayer(StepLayer):
    """A cross-attention layer among a decoder's own: it attends to the pictures of one sequence, and is empty
    for a text (Mllama).
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what the sequence attends to; a step of texts has no table for it."""
        if self.kind not in self.step.batches:
            raise Unservable(
                f"layer {self.number} is a cross-attention layer and the step has no table for it; use "
                "generate()"
            )
        return super().update(key_states, value_states, *args, **kwargs)

    @property
    def is_initialized(self) -> bool:
        """True if it holds something; captured steps are of texts."""
        return self._filled and self.sequences.static is None

    @is_initialized.setter
    def is_initialized(self, filled: bool) -> None:
        self._filled = filled

    def _stored(self, which: Any) -> torch.Tensor | None:
        return super()._stored(which) if self.is_initialized else None

    def get_seq_length(self) -> int:
        """The tokens of the pictures that are in the pages before the step."""
        return self.step.cross_tokens if self.is_initialized else 0

    def reset(self) -> None:
        super().reset()
        self.is_initialized = self.step.cross_tokens > 0
