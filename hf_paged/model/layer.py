"""One layer of the cache, as transformers' cache layers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..blocks import LayerKind
from ..kv import Batch, LayerGroup, Pages, Rows, Sequences
from .lazy import LazyPages, LazyRotated, NotCapturable, Path, as_dense
from .lengths import DeviceNumber

DIFFER = (
    "a forward failed halfway (use a new cache), or the layer attends to another sequence than the text, "
    "which the config says in cross_attention_layers (use transformers' own cache)"
)
"""Why layers of one kind may hold different tokens, and what to do."""


class PagedLayer(DynamicLayer):
    """Keys and values of one layer in pages: `update` writes the new tokens and answers with a view of the
    pages.

    The tables belong to the cache's sequences and are shared by all layers of one kind: the first layer of a
    step plans it, the others follow.
    """

    is_compileable = False
    is_croppable = True
    complete = True
    """True if the pages hold all that the layer keeps."""

    def __init__(self, number: int, kind: LayerKind, sequences: Sequences) -> None:
        CacheLayerMixin.__init__(self)
        self.number = number
        self.kind = kind
        self.sequences = sequences
        self.is_sliding = kind.window is not None
        if kind.window is not None:
            self.sliding_window = kind.window
        self.columns = 0
        """How many columns this layer has seen; fewer than its rows have only within a step."""
        self.path: Path = "unused"
        """How attention last read this layer: from the pages, or through a dense copy."""
        self.widths: dict[str, tuple[int, int]] = {}
        """Heads and width of "keys" and of "values", once the layer was initialized."""

    @property
    def rows(self) -> Rows:
        """The rows of the layer's kind."""
        return self.sequences.rows[self.kind]

    @property
    def group(self) -> LayerGroup:
        """The pools of the layer's kind."""
        return self.rows.group

    @property
    def batch(self) -> Batch:
        """Where the tokens of the step lie."""
        static = self.sequences.static
        return self._step if static is None else static[self.kind]

    @property
    def _step(self) -> Batch:
        """The same of a step that is not captured."""
        return self.rows.batch

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind.name}, tokens={self.columns}, path={self.path})"

    # ---- a step

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note the shape of keys [rows, heads, new, key_dim] and values; the first token takes memory."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        heads = key_states.shape[1]
        self.widths = {"keys": (heads, key_states.shape[3]), "values": (heads, value_states.shape[3])}
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys [rows, heads, new, key_dim] and values; return all that the new tokens see."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "a paged cache keeps no gradients; call the model under torch.no_grad(), or train without a "
                "cache"
            )
        sequences = self.sequences
        if sequences.static is not None:
            return self._captured(key_states, value_states)
        rows = sequences.rows[self.kind]
        with sequences.memory.lock:
            rows.group.look_at(self.number, key_states, value_states)
            count, _, new, _ = key_states.shape
            batch = sequences.extend(self.kind, count, new) if self.columns == rows.columns else rows.batch
            if batch.rows != count or batch.new != new or self.columns + new != rows.columns:
                raise RuntimeError(
                    f"layer {self.number} holds {self.columns} tokens and was given {new} more for "
                    f"{count} rows, while the other layers hold {rows.columns} for {batch.rows}; {DIFFER}"
                )
            store, place = rows.group.store(self.number)
            pages = store.pages(place, batch)
            pages.ops.write(pages, key_states, value_states)
            self.columns = rows.columns
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._pair(pages, key_states, value_states)

    def _captured(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in a step that is being captured: the replay's caller keeps the books."""
        batch = (self.sequences.static or {}).get(self.kind)
        if batch is None or not batch.new:
            raise NotCapturable("cross-attention layers are given another image")
        pages = self._pages()
        value_states = as_dense(value_states)
        if isinstance(key_states, LazyRotated) and key_states.rotation.fits(pages, value_states):
            key_states.rotation.write(pages, value_states)
        else:
            pages.ops.write(pages, as_dense(key_states), value_states)
        return self._pair(pages, key_states, value_states)

    def _pages(self) -> Pages:
        store, place = self.group.store(self.number)
        captured = self.sequences.static is not None
        pages: Pages = store.pages(place, self.batch, captured=captured)
        return pages

    def _pair(
        self, pages: Pages, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a step's attention: its own `keys` and `values`, and all before them."""
        columns = self._columns_of(pages, stored=False)
        return (
            LazyPages.of(self, pages, pages.keys, columns, keys),
            LazyPages.of(self, pages, pages.values, columns, values),
        )

    def _past(self, pages: Pages, which: Literal["keys", "values"]) -> torch.Tensor:
        """Stored keys or values, outside a step."""
        return LazyPages.of(self, pages, getattr(pages, which), self._columns_of(pages, stored=True), None)

    def _columns_of(self, pages: Pages, stored: bool) -> int:
        """How many columns are visible to a step, or `stored`."""
        columns = pages.batch.columns
        window = self.kind.window
        if window is None:
            return columns
        return min(columns, window - 1 + (self.rows.recorded if stored else pages.batch.new))

    # ---- what transformers reads

    @property
    def keys(self) -> torch.Tensor | None:
        return self._stored("keys")

    @keys.setter
    def keys(self, value: object) -> None:
        _only_none(value)

    @property
    def values(self) -> torch.Tensor | None:
        return self._stored("values")

    @values.setter
    def values(self, value: object) -> None:
        _only_none(value)

    def _stored(self, which: Literal["keys", "values"]) -> torch.Tensor | None:
        if not self.is_initialized:
            return None
        if not self.columns:
            return self._nothing(which)
        with self.sequences.memory.lock:
            if self.sequences.static is None:
                self.sequences.flush()
                self.sequences.rows[self.kind].require_whole()
            return self._past(self._pages(), which)

    def _nothing(self, which: Literal["keys", "values"]) -> torch.Tensor:
        """Keys or values of an empty layer: [rows, heads, 0, dim] after a crop, [0] before a first token."""
        rows = self.rows.count
        heads, dim = self.widths[which]
        return torch.empty((rows, heads, 0, dim) if rows else 0, dtype=self.dtype, device=self.device)

    @property
    def length(self) -> Any:
        """The visible columns in a step that is captured: only the device knows them; None elsewhere."""
        static = self.sequences.static
        if static is None or not static[self.kind].new:
            return None
        batch = static[self.kind]
        window = self.kind.window
        after = DeviceNumber.of(batch.before) + batch.new
        return after if window is None else DeviceNumber.of(after.clamp(max=window - 1 + batch.new))

    def get_seq_length(self) -> int:
        static = self.sequences.static
        if static is not None and self.kind in static and static[self.kind].new:
            # Transformers' own static cache answers with a number on the device, too.
            return DeviceNumber.of(static[self.kind].before)  # type: ignore[return-value]
        return self.columns

    def get_max_length(self) -> int:
        return -1 if self.kind.window is None else self.kind.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns a step of `query_length` tokens sees, and the first of them."""
        if self.sequences.static is not None:
            return self.get_seq_length() + query_length, 0
        kept = self.kind.kept(self.columns)
        return kept + query_length, self.columns - kept

    def activate_past_recording(self) -> None:
        self.sequences.keep_past()

    # ---- the cache does these for all layers at once

    def reset(self) -> None:
        self._require_all("reset")
        self.is_initialized = False
        self.follow()

    def crop(self, tokens_to_remove: int) -> None:
        self._require_all("crop")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._require_all("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._require_all("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._require_all("batch_select_indices")

    def _require_all(self, method: str) -> None:
        require_all(self.sequences, self.number, method)

    def follow(self) -> None:
        """Note what the rows have done without this layer, if it keeps anything."""
        self.columns = self.rows.columns if self.is_initialized else 0

    def continue_from(self, other: PagedLayer) -> None:
        """Continue from the state of another cache's layer, over a fork of its rows."""
        self.columns = other.columns
        self.path = other.path
        self.widths = other.widths
        self.is_initialized = other.is_initialized
        if other.widths:
            self.dtype = other.dtype
            self.device = other.device

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...


class WindowLayer(PagedLayer, DynamicSlidingWindowLayer):
    """A layer that attends to a window, with what stock's sliding layer lets its users read and set."""

    @property
    def _sliding_window_tensor(self) -> torch.Tensor:  # type: ignore[override]
        """The window as an item of the cache: stock's DynamicCache rebuilds a sliding layer from it."""
        device = self.device if self.is_initialized else "cpu"
        return torch.tensor(self.sliding_window, dtype=torch.long, device=device)

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        return self.get_seq_length()

    @property
    def record_past(self) -> bool:
        """True if what the window has passed is kept until `crop`."""
        return self.rows.keep_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.rows.keep_past = value


def require_all(sequences: Sequences, number: int, method: str) -> None:
    """Raise unless the cache changes all layers: layer `number` has no rows of its own to change."""
    if not sequences.changes_all:
        raise RuntimeError(
            f"layers[{number}].{method}() cannot change one layer of a paged cache, whose layers share their "
            f"rows; call {method}() of the cache"
        )


def _only_none(value: object) -> None:
    if value is not None:
        raise AttributeError(
            "keys and values live in the pool's pages and cannot be assigned; pass them to update()"
        )
