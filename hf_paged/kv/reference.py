"""Paged attention in plain torch: right on every device, and the path of CPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from .batch import Batch


class InvariantFlag(threading.local):
    """The flag that no result may depend on the batch; torch's attention is replaced then."""

    wanted: ContextVar[bool] = ContextVar("hf_paged_batch_invariant", default=False)
    entered = False  # by this thread: it may have the copy of another's context, or of a block that has ended

    def get(self) -> bool:
        return self.entered and self.wanted.get()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Torch computes as ever inside: numbers in which no row has a part."""
        before = self.wanted.set(False)
        try:
            yield
        finally:
            self.wanted.reset(before)


invariant = InvariantFlag()


def write(data: torch.Tensor, batch: Batch, tokens: torch.Tensor) -> None:
    """Put the keys or values [rows, heads, new, dim] of new tokens in their slots of data [slots, heads,
    dim].
    """
    slots, sources = batch.written(data.device)
    flat = tokens.transpose(1, 2).flatten(0, 1).to(data.dtype)
    data.index_copy_(0, slots, flat if sources is None else flat.index_select(0, sources))


def gather(data: torch.Tensor, batch: Batch, first: int) -> torch.Tensor:
    """Columns from `first` on of data [slots, heads, dim], as [rows, heads, columns - first, dim].

    Rows side by side are answered with a view. Columns of left padding hold some token's content; mask them.
    """
    batch.check()
    if batch.strided is not None:
        return batch.strided.view(data, batch.rows, first, batch.columns)
    slots, heads, dim = data.shape
    if batch.empty:
        return data.new_zeros(batch.rows, heads, batch.columns - first, dim)
    blocks = batch.blocks(first, data.device)
    if blocks is not None:
        size = batch.block_size
        token = heads * dim
        found = data.view(slots // size, size * token).index_select(0, blocks)
        row = found.numel() // batch.rows
        # One operation for what takes three in words.
        return found.as_strided(
            (batch.rows, heads, batch.columns - first, dim), (row, dim, token, 1), first % size * token
        )
    index = batch.slots(first, data.device)
    found = data.view(slots, heads * dim).index_select(0, index.flatten()).view(*index.shape, heads, dim)
    return found.transpose(1, 2)


def advance(
    table: torch.Tensor,
    tokens: torch.Tensor,
    seen: torch.Tensor,
    slots: torch.Tensor,
    columns: torch.Tensor,
    new: int,
    block_size: int,
) -> None:
    """Where a captured step's tokens go: slots [rows * new] from table [rows, width] and tokens [rows], which
    are counted.

    A row with -1 tokens is not there: its slots are -1 and it has seen [rows] nothing. columns [2]: before
    this step, after it.
    """
    there = tokens >= 0
    position = tokens.clamp(min=0).long()[:, None] + torch.arange(new, device=table.device)
    found = table.long().gather(1, position // block_size) * block_size + position % block_size
    slots.copy_(torch.where(there[:, None], found, -1).flatten())
    tokens.add_(there, alpha=new)
    seen.copy_(tokens.clamp(min=0))
    columns[0].copy_(columns[1])
    columns[1].add_(new)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(softcap(query keys^T * scale) + mask) values, with an optional sink per head that only takes
    weight.

    query [rows, query_heads, new, key_dim]; keys and values [rows, heads, columns, dim], each head serving
    query_heads / heads of the query's; mask [rows or 1, query_heads or 1, new, columns], boolean (True is
    seen) or added; causal: the new tokens are all the columns, each sees itself and what is before. The
    answer is [rows, new, query_heads, value_dim]. A token that sees nothing gives 0.
    """
    rows, query_heads, new, _ = query.shape
    heads = keys.shape[1]
    repeats = query_heads // heads
    if query.is_cuda and invariant.get() and softcap is None and sinks is None:
        # What replaces torch's attention knows masks as models make them.
        out = scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=repeats > 1
        )
        return out.transpose(1, 2)
    if causal and softcap is None and sinks is None:
        grouped = repeats > 1 and not query.is_cuda  # a CUDA device may have no fast kernel for it
        if not grouped:
            keys = _repeat(keys, repeats)
            values = _repeat(values, repeats)
        out = scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).contiguous()
    if causal:
        mask = torch.ones(new, new, dtype=torch.bool, device=query.device).tril()[None, None]
    # All query heads of one key head become query tokens of it: no key is ever repeated.
    folded = query.reshape(rows, heads, repeats * new, query.shape[3])
    if mask is not None and repeats > 1 and mask.shape[1] > 1:
        mask = mask.unflatten(1, (heads, repeats)).flatten(2, 3)
    elif mask is not None and repeats > 1 and new > 1:
        mask = mask[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(2, 3)
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        if mask is not None and mask.dtype == torch.bool and new > 1 and query.is_cuda:
            # In half precision a CUDA device answers with an average where nothing is seen.
            out = out.masked_fill(~mask.any(-1, keepdim=True), 0)
    else:
        sink = (
            None
            if sinks is None
            else sinks.reshape(1, heads, repeats, 1).expand(rows, -1, -1, new).reshape(rows, heads, -1, 1)
        )
        out = _attend_by_hand(folded, keys, values, mask, scale, softcap, sink)
    if new == 1:
        return out.reshape(rows, 1, query_heads, values.shape[3])
    return out.reshape(rows, query_heads, new, values.shape[3]).transpose(1, 2).contiguous()


def attend_latents(
    query: torch.Tensor,
    rotated: torch.Tensor,
    latents: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """softmax((query latents^T + rotated positions^T) * scale + mask) latents.

    query [rows, query_heads, new, rank], rotated [rows, query_heads, new, rope], latents [rows, 1, columns,
    rank], positions [rows, 1, columns, rope], mask as in `attend`. The answer is like the query; a token that
    sees nothing gives 0.
    """
    # All heads read the same latents: they become tokens of one head.
    scores = query.flatten(1, 2)[:, None] @ latents.transpose(2, 3) + rotated.flatten(1, 2)[
        :, None
    ] @ positions.transpose(2, 3)
    scores = (scores.float() * scale).unflatten(2, query.shape[1:3])[:, 0]
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~(scores > -torch.inf).any(-1, keepdim=True), 0)
    out: torch.Tensor = weights.to(latents.dtype).flatten(1, 2)[:, None] @ latents
    return out.view_as(query)


def _repeat(x: torch.Tensor, repeats: int) -> torch.Tensor:
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


def _attend_by_hand(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with what scaled_dot_product_attention has no words for; `sink` is [rows, heads, tokens,
    1].
    """
    scores = (query @ keys.transpose(-1, -2)).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores)], dim=-1)
    weights = scores.softmax(-1)
    if mask is not None and sink is None:
        weights = weights.masked_fill(~(scores > -torch.inf).any(-1, keepdim=True), 0)
    if sink is not None:
        weights = weights[..., :-1]
    return weights.to(values.dtype) @ values
