"""The content of each layer of a cache: keys and values in pages, tensors of its own, or both."""

from __future__ import annotations

import functools
from collections.abc import Collection
from copy import deepcopy
from typing import Any, NamedTuple

from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from ..blocks import Cross, Full, LayerKind, State, Window
from ..kv import Sequences
from .layer import PagedLayer, WindowLayer
from .state_layers import IN_SLOTS, KeepsStates, StateLayer

STATE: Any = LinearAttentionLayer
FULL = Full()
CROSS = Cross()
STATES = State()
STATE_AND_FULL = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
STATE_AND_WINDOW = getattr(cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer", None)
NO_CONTENT = frozenset({getattr(cache_utils, "DummyLayer", None)})
"""Layers that keep nothing: those that read another layer's keys and values."""
IN_PAGES = frozenset({"keys", "values", "cumulative_length", "_sliding_window_tensor"})
"""Names that stock's layers have for what lies in pages here."""
OF_PLACE = frozenset({"number", "kind", "sequences"})
"""Names that layers have for their place in a cache."""
KEPT_FROM_STOCK = ("update", "get_seq_length", "get_mask_sizes", "lazy_initialization")
"""A layer that changes one of these does not keep plain keys and values."""


class Slot(NamedTuple):
    """A layer's place in a cache: its kind, the class of the layer there, and what else it keeps."""

    kind: LayerKind | None
    paged: Any
    source: Any
    """A layer whose other content is taken over; without a kind, the layer itself."""

    @property
    def kinds(self) -> list[LayerKind]:
        """The kinds of all that the layer keeps in pools."""
        beside = self.kind not in (None, STATES) and issubclass(self.paged, KeepsStates)
        return [kind for kind in (self.kind, STATES if beside else None) if kind is not None]

    def open(self, number: int, sequences: Sequences) -> Any:
        """The layer for this place."""
        if self.kind is None:
            return self.source
        made = self.paged(number, self.kind, sequences)
        take_over(made, self.source)
        return made

    @classmethod
    def of(cls, layer: Any, cross: bool) -> Slot:
        """The place for a layer that stock would make."""
        stock: Any = type(layer)
        if stock is STATE and not cross:
            return cls(STATES, StateLayer, layer)
        paged = PagedLayer if cross and isinstance(layer, DynamicLayer) else paged_class(stock)
        if paged is None:
            return cls(None, None, layer)
        if cross:
            return cls(CROSS, paged, layer)
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        return cls(FULL if window is None else Window(window), paged, layer)

    @classmethod
    def like(cls, layer: Any, memo: dict[int, Any]) -> Slot:
        """The place for a copy of a cache's layer."""
        return (
            cls(layer.kind, type(layer), layer)
            if isinstance(layer, (PagedLayer, StateLayer))
            else cls(None, None, deepcopy(layer, memo))
        )


def cross_layers(config: Any) -> Collection[int]:
    """The layers of a decoder's own cache that attend across, to other tokens than the text's."""
    return getattr(config, "cross_attention_layers", None) or ()


def slots_of(model: Any, cross: bool) -> list[Slot]:
    """The places of a model's cache, as its config lays them out; `cross` for the cache of what an encoder
    made.

    A decoder's own cache may have layers that attend across, too: to a picture's tokens (Mllama), which are
    none of the text.
    """
    config = model.config.get_text_config(decoder=True)
    stock = DynamicCache(config=config).layers or [DynamicLayer() for _ in range(config.num_hidden_layers)]
    own_cross = cross_layers(config)
    return [Slot.of(layer, cross or i in own_cross) for i, layer in enumerate(stock)]


class StatefulLayer(KeepsStates, PagedLayer):
    """Attention in pages and a recurrent state in slots, side by side in one layer (Zamba, Falcon-H1, ...).

    The other base is stock's layer, which comes after this one.
    """

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Stock names what it has: a state. Keys and values come without names."""
        if kwargs:
            STATE.lazy_initialization(self, **kwargs)
            self.keep_past(**kwargs)
        else:
            PagedLayer.lazy_initialization(self, *args)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return bool(STATE.is_croppable.fget(self))

    def get_max_length(self) -> int:
        """Stock's answer for a layer with a state, windows included."""
        return int(STATE.get_max_length(self))

    def activate_past_recording(self) -> None:
        PagedLayer.activate_past_recording(self)
        self.keep_apart()
        STATE.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        PagedLayer.crop(self, tokens_to_remove)
        if not self.complete:
            STATE.crop(self, tokens_to_remove)

    def reset(self) -> None:
        PagedLayer.reset(self)
        if not self.complete:
            STATE.reset(self)

    def reorder_cache(self, beam_idx: Any) -> None:
        PagedLayer.reorder_cache(self, beam_idx)
        if not self.complete:
            STATE.reorder_cache(self, beam_idx)


class BesideLayer(PagedLayer):
    """Attention in pages and an indexer's keys or the like in stock's tensors: stock's methods end in ours.

    The other base is stock's layer, which comes before this one.
    """

    complete = False
    at_first: dict[str, Any]
    """The state that the layer keeps in addition to its pages before the first token."""

    def reset(self) -> None:
        # Not every stock layer drops its own: an older one fills it with zeros and keeps its length.
        super().reset()
        vars(self).update(deepcopy(self.at_first))


@functools.cache
def paged_class(stock: Any) -> Any:
    """The paged layer that replaces a class of stock layers, or None if nothing of it can be paged."""
    if stock is DynamicLayer:
        return PagedLayer
    if stock is DynamicSlidingWindowLayer:
        return WindowLayer
    # Stock compares the full layer's class name: any other class counts as having no attention.
    if stock is STATE_AND_FULL and stock is not None:
        return _class_beside(stock, (StatefulLayer, stock), {})
    if stock is STATE_AND_WINDOW and stock is not None:
        return _class_beside(stock, (StatefulLayer, WindowLayer, stock), {})
    if not issubclass(stock, DynamicLayer) or any(
        getattr(stock, name) is not getattr(DynamicLayer, name) for name in KEPT_FROM_STOCK
    ):
        return None
    # Plain keys and values with a further state (an indexer's keys): its methods end in ours instead of
    # DynamicLayer's. Without a layer type of its own, or transformers would take it for stock's.
    return _class_beside(stock, (stock, BesideLayer), {"_layer_type": None, "__init__": PagedLayer.__init__})


def _class_beside(stock: Any, bases: tuple[Any, ...], namespace: dict[str, Any]) -> Any:
    """A class for the paged layers of `stock`; pickle and inspect find it in this module."""
    name = f"Paged{stock.__name__}"
    doc = f"{stock.__name__} with its keys and values in pages."
    made = type(name, bases, {"__module__": __name__, "__doc__": doc, **namespace})
    globals()[name] = made
    return made


def beside(layer: Any) -> dict[str, Any]:
    """The content of a layer outside the pages, by name: its states; of a layer without pages everything."""
    own: set[str] = {"states"} if isinstance(layer, KeepsStates) else set()
    if isinstance(layer, PagedLayer):
        own |= vars(type(layer)(layer.number, layer.kind, layer.sequences)).keys() | IN_PAGES
    elif own:
        own |= OF_PLACE
    return {name: value for name, value in vars(layer).items() if name not in own}


def take_over(layer: PagedLayer, source: Any) -> None:
    """Copy the state that `source` keeps in addition to keys and values."""
    if type(layer) in (PagedLayer, WindowLayer):
        return
    own: set[str] = vars(layer).keys() | IN_PAGES
    if isinstance(layer, KeepsStates):
        own = {*(own if isinstance(layer, PagedLayer) else OF_PLACE), "states"}
        if getattr(source, "complete", False):
            own = own | IN_SLOTS
    further = {name: deepcopy(value) for name, value in vars(source).items() if name not in own}
    vars(layer).update(further)
    if isinstance(layer, BesideLayer) and not isinstance(source, BesideLayer):
        layer.at_first = deepcopy(further)
