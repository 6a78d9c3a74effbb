"""Plain torch over pages: right on every device, and what every other way of doing it is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from . import reference
from .batch import Batch, Singles, Span, StridedView


class LayerViews(Protocol):
    """A store, as far as the pages of its layers ask it."""

    def views(
        self, place: int, strided: StridedView, batch: Batch, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, heads, columns - first, dim] of the layer at `place` as views, where rows
        lie at one distance from each other.
        """


class Pages(NamedTuple):
    """The input of one layer's attention: the layer's slots, and where the rows' tokens lie in them."""

    keys: torch.Tensor
    """[slots, heads, key_dim]"""
    values: torch.Tensor
    """[slots, heads, value_dim]"""
    batch: Batch
    ops: Ops
    store: LayerViews | None = None
    """The store that the slots are of, for what is made for all of its layers at once."""
    place: int = 0
    """The layer's place in the store."""


class Seen(NamedTuple):
    """The columns that a layer's new tokens attend to: from `first` on.

    mask: [rows or 1, query_heads or 1, new, columns - first], boolean or added. Without one, everything from
        `first` on, or if `causal` each token what is at or before it and, with a window, not further back
        than that.
    """

    first: int
    mask: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None

    def biased(self, bias: torch.Tensor, batch: Batch) -> Seen:
        """The same with a learned bias [rows or 1, query_heads, new, columns] on every score."""
        mask = batch.visible(self.first, self.window, bias.device) if self.causal else self.mask
        if mask is None:
            return Seen(self.first, bias)
        lowest = torch.finfo(bias.dtype).min
        return Seen(self.first, torch.where(mask, bias, lowest) if mask.dtype == torch.bool else mask + bias)


class Ops:
    """Plain torch: right on every device, and the path of CPUs."""

    kernels: Any = None
    """The kernels, where they are used, for other parts that can use some of them."""

    def advance(
        self,
        table: torch.Tensor,
        tokens: torch.Tensor,
        seen: torch.Tensor,
        slots: torch.Tensor,
        columns: torch.Tensor,
        new: int,
        block_size: int,
    ) -> None:
        """Begin a captured step: work out where its tokens go, and count them."""
        reference.advance(table, tokens, seen, slots, columns, new, block_size)

    def write(self, pages: Pages, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put a step's keys [rows, heads, new, key_dim] and values into their slots."""
        batch = pages.batch
        if pages.store is None or batch.new_strided is None:
            reference.write(pages.keys, batch, keys)
            reference.write(pages.values, batch, values)
            return
        first = batch.columns - batch.new
        own_keys, own_values = pages.store.views(pages.place, batch.new_strided, batch, first)
        own_keys.copy_(keys)
        own_values.copy_(values)

    def copy(self, pools: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
        """pool[:, targets[i]] = pool[:, sources[i]] for every pool [layers, blocks, ...]; no target is a
        source.
        """
        for pool in pools:
            pool.index_copy_(1, targets.long(), pool.index_select(1, sources))

    def gather(self, data: torch.Tensor, batch: Batch, first: int) -> torch.Tensor:
        """Columns from `first` on of data [slots, heads, dim], as [rows, heads, columns - first, dim]; those
        of padding mean nothing.
        """
        return reference.gather(data, batch, first)

    def read(self, pages: Pages, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the columns from `first` on, as `gather` answers them."""
        batch = pages.batch
        if pages.store is None or batch.strided is None:
            return self.gather(pages.keys, batch, first), self.gather(pages.values, batch, first)
        batch.check()
        return pages.store.views(pages.place, batch.strided, batch, first)

    def attend(
        self,
        query: torch.Tensor,
        pages: Pages,
        seen: Seen,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [rows, query_heads, new, key_dim] over what it sees: [rows, new, query_heads,
        value_dim].

        `new` are the step's own keys and values, if the caller still has them: where they are all there is,
        they are read.
        """
        batch = pages.batch
        parts = None if batch.plain else batch.parts(seen.window, query.device)
        if parts is not None:
            return attend_parts(query, pages, parts, new, scale=scale, softcap=softcap, sinks=sinks)
        if new is not None and batch.fresh and seen.first == 0:
            keys, values = new
        else:
            keys, values = self.read(pages, seen.first)
        narrow = seen.window is not None and batch.columns > seen.window
        simply = seen.causal and batch.fresh and batch.new > 1 and batch.starts is None and not narrow
        mask = (
            batch.visible(seen.first, seen.window, query.device) if seen.causal and not simply else seen.mask
        )
        return reference.attend(
            query, keys, values, mask, causal=simply, scale=scale, softcap=softcap, sinks=sinks
        )

    def attend_latents(
        self,
        query: torch.Tensor,
        pages: Pages,
        seen: Seen,
        attention: Callable[..., torch.Tensor],
        value_dim: int,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Attention of query [rows, query_heads, new, key_dim] over latents: [rows, new, query_heads,
        value_dim].

        The pages hold one head of latents [rank] as keys and of rotary parts [rope] as values. `attention`
        computes with these, gathered, and has the arguments of `reference.attend`.
        """
        batch = pages.batch
        parts = batch.parts(seen.window, query.device)
        if parts is not None:
            return attend_parts(query, pages, parts, new, attention, value_dim, scale=scale)
        latents, positions = self.read(pages, seen.first)
        mask = batch.visible(seen.first, seen.window, query.device) if seen.causal else seen.mask
        return attention(query, latents, positions, mask, scale=scale)


def attend_parts(
    query: torch.Tensor,
    pages: Pages,
    parts: tuple[Singles | None, list[Span]],
    new: tuple[torch.Tensor, torch.Tensor] | None,
    attention: Callable[..., torch.Tensor] = reference.attend,
    value_dim: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attention of query [1, query_heads, tokens, key_dim], each token over its own sequence: [1, tokens,
    query_heads, value_dim].

    new: the step's own keys and values [1, heads, tokens, dim], if the caller still has them.
    attention: computes it for some sequences of one length, with the arguments of `reference.attend`.
    value_dim: the width of its answer, if that is not the width of the stored values.
    """
    singles, spans = parts
    if singles is not None and singles.tokens is None:
        # Every sequence decodes: the tokens are in their rows' order.
        return _attend_singles(query[0].transpose(0, 1), pages, singles, attention, options)[None]
    out = query.new_empty(query.shape[2], query.shape[1], value_dim or pages.values.shape[2])
    if singles is not None and singles.tokens is not None:
        tokens = query[0].index_select(1, singles.tokens).transpose(0, 1)
        answer = _attend_singles(tokens, pages, singles, attention, options)
        out.index_copy_(0, singles.tokens, answer.to(out.dtype))
    for begin, end, slots, mask in spans:
        if slots is not None:
            keys, values = (_gather(data, slots, 1) for data in (pages.keys, pages.values))
        elif new is not None:
            keys, values = (data[:, :, begin:end] for data in new)
        else:
            own = pages.batch.written(query.device)[0][begin:end]
            keys, values = (_gather(data, own, 1) for data in (pages.keys, pages.values))
        causal = mask is None
        out[begin:end] = attention(query[:, :, begin:end], keys, values, mask, causal=causal, **options)[0]
    return out[None]


def _attend_singles(
    tokens: torch.Tensor,
    pages: Pages,
    singles: Singles,
    attention: Callable[..., torch.Tensor],
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of tokens [rows, query_heads, key_dim], each over its own row: [rows, query_heads,
    value_dim].
    """
    keys, values = (_gather(data, singles.slots, tokens.shape[0]) for data in (pages.keys, pages.values))
    return attention(tokens.unsqueeze(2), keys, values, singles.mask, **options)[:, 0]


def _gather(data: torch.Tensor, slots: torch.Tensor, rows: int) -> torch.Tensor:
    """data [slots, heads, dim] at slots [rows * columns], as [rows, heads, columns, dim]."""
    return data.flatten(1).index_select(0, slots).view(rows, -1, *data.shape[1:]).transpose(1, 2)
