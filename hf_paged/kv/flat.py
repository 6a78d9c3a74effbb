"""One step of many sequences in one row of tokens: where each one's tokens are written and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..blocks import BlockTable
from .batch import Batch
from .reference import attend
from .upload import upload

if TYPE_CHECKING:
    from .store import Pages


class _Singles(NamedTuple):
    """Rows of one new token, read together: row i attends to `slots[i]` where `mask[i]` is true."""

    tokens: torch.Tensor | None
    """Their places [rows] in the row of tokens; None if they are all there is."""
    slots: torch.Tensor | slice
    """[rows * columns]; outside what a row sees its last token's, so what is read is finite.

    A slice where there is one row and its blocks lie side by side.
    """
    mask: torch.Tensor | None
    """[rows, 1, 1, columns]; None where every row sees all of its columns."""


class _Span(NamedTuple):
    """A row of several new tokens, from place `begin` to `end`."""

    begin: int
    end: int
    slots: torch.Tensor | None
    """[columns] of all that it sees; None if the step's own tokens are all there is."""
    mask: torch.Tensor | None
    """[1, 1, new, columns]; None where `causal` suffices."""


class FlatBatch(Batch):
    """Several sequences in one row: sequence i brings counts[i] new tokens, the last ones of its table, one
    sequence after the other.

    A model sees one row of `new` tokens; only attention separates the sequences. The maker of the batch keeps
    the tables unchanged until the step is over.
    """

    def __init__(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> None:
        super().__init__(
            list(tables), None, max(table.length for table in tables), sum(counts), None, lambda: True
        )
        self.rows = 1  # as the model sees it
        self.fresh = False  # several sequences are never one sequence
        self.counts = list(counts)
        self.borders = [0, *accumulate(counts)]
        """Sequence i's new tokens are those from borders[i] to borders[i + 1]."""
        self._parts: dict[tuple[torch.device, int | None], tuple[_Singles | None, list[_Span]]] = {}
        self._borders: dict[torch.device, torch.Tensor] = {}

    def written(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots [new] that take the new tokens, which are all of them."""
        if device not in self._written:
            slots: list[int] = []
            for table, count in zip(self.tables, self.counts, strict=True):
                slots += _slots(table, table.length - count)
            self._written[device] = upload(slots, device), None
        return self._written[device]

    def borders_on(self, device: torch.device) -> torch.Tensor:
        """The borders [sequences + 1], int32."""
        if device not in self._borders:
            self._borders[device] = upload(self.borders, device, torch.int32)
        return self._borders[device]

    def parts(self, window: int | None, device: torch.device) -> tuple[_Singles | None, list[_Span]]:
        """What plain torch reads: rows of one token together, each longer row by itself. All layers of a step
        share it.
        """
        if (device, window) not in self._parts:
            single = [i for i, count in enumerate(self.counts) if count == 1]
            longer = [i for i, count in enumerate(self.counts) if count > 1]
            self._parts[device, window] = (
                self._singles(single, window, device) if single else None,
                [self._span(i, window, device) for i in longer],
            )
        return self._parts[device, window]

    def _singles(self, rows: list[int], window: int | None, device: torch.device) -> _Singles:
        size = self.block_size
        tables = [self.tables[i] for i in rows]
        begins = [0 if window is None else max(0, table.length - window) for table in tables]
        starts = [begin // size for begin in begins]
        held = [table.blocks[start - table.released :] for table, start in zip(tables, starts, strict=True)]
        places = None if len(rows) == len(self.tables) else upload([self.borders[i] for i in rows], device)
        if len(held) == 1 and _side_by_side(held[0]):
            first = held[0][0] * size + begins[0] % size
            return _Singles(places, slice(first, first + tables[0].length - begins[0]), None)
        width = max(map(len, held))
        blocks = upload([row + row[-1:] * (width - len(row)) for row in held], device)
        # Of every row where it begins and ends, counted from its first block's first slot, and the slot of
        # its last token.
        edges = [
            (begin - start * size, table.length - start * size, row[-1] * size + (table.length - 1) % size)
            for table, begin, start, row in zip(tables, begins, starts, held, strict=True)
        ]
        begin, end, last = upload(edges, device).unbind(1)
        at = torch.arange(width * size, device=device)
        seen = at < end[:, None]
        if window is not None:
            seen &= at >= begin[:, None]
        slots = (blocks[:, :, None] * size + at[:size]).flatten(1)
        slots = torch.where(seen, slots, last[:, None])
        return _Singles(places, slots.flatten(), seen[:, None, None])

    def _span(self, row: int, window: int | None, device: torch.device) -> _Span:
        table = self.tables[row]
        count = self.counts[row]
        begin = self.borders[row]
        end = self.borders[row + 1]
        first = 0 if window is None else max(0, table.length - count - window + 1)
        narrow = window is not None and count > window
        slots = None if count == table.length else upload(_slots(table, first), device)
        if slots is None and not narrow:
            return _Span(begin, end, None, None)
        at = torch.arange(table.length - count, table.length, device=device)[:, None]
        column = torch.arange(first, table.length, device=device)
        mask = column <= at
        if window is not None:
            mask = mask & (column > at - window)
        return _Span(begin, end, slots, mask[None, None])


def _side_by_side(blocks: list[int]) -> bool:
    """Whether the blocks follow each other in the pool."""
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))


def _slots(table: BlockTable, first: int) -> list[int]:
    """The slots of a table's tokens from position `first` on."""
    size = table.pool.block_size
    place = first // size - table.released
    slots = [slot for block in table.blocks[place:] for slot in range(block * size, block * size + size)]
    begin = first % size
    return slots[begin : begin + table.length - first]


def attend_flat(
    query: torch.Tensor,
    pages: Pages,
    window: int | None,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    attention: Callable[..., torch.Tensor] = attend,
    value_dim: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attention of query [1, query_heads, tokens, key_dim], each token over its own sequence: [1, tokens,
    query_heads, value_dim].

    new: the step's own keys and values [1, heads, tokens, dim], if the caller still has them.
    attention: computes it for some sequences of one length, with the arguments of `reference.attend`.
    value_dim: the width of its answer, if that is not the width of the stored values.
    """
    batch = pages.batch
    assert isinstance(batch, FlatBatch)
    singles, spans = batch.parts(window, query.device)
    if (
        singles is not None and singles.tokens is None
    ):  # every sequence decodes: the tokens are in their rows' order
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
            own = batch.written(query.device)[0][begin:end]
            keys, values = (_gather(data, own, 1) for data in (pages.keys, pages.values))
        causal = mask is None
        out[begin:end] = attention(query[:, :, begin:end], keys, values, mask, causal=causal, **options)[0]
    return out[None]


def _attend_singles(
    tokens: torch.Tensor,
    pages: Pages,
    singles: _Singles,
    attention: Callable[..., torch.Tensor],
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of tokens [rows, query_heads, key_dim], each over its own row: [rows, query_heads,
    value_dim].
    """
    keys, values = (_gather(data, singles.slots, tokens.shape[0]) for data in (pages.keys, pages.values))
    return attention(tokens.unsqueeze(2), keys, values, singles.mask, **options)[:, 0]


def _gather(data: torch.Tensor, slots: torch.Tensor | slice, rows: int) -> torch.Tensor:
    """data [slots, heads, dim] at slots [rows * columns], as [rows, heads, columns, dim]."""
    if isinstance(slots, slice):
        return data[None, slots].transpose(1, 2)
    return data.flatten(1).index_select(0, slots).view(rows, -1, *data.shape[1:]).transpose(1, 2)
