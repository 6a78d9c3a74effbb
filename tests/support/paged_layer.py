"""One layer on pages beside the same keys and values as plain tensors: what attention over any history must
answer.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from hf_paged.blocks import Full, Window
from hf_paged.kv import Layout, Memory, Pages, Rows, Seen
from hf_paged.kv.config import CacheConfig

HEADS = 2


class Paged:
    """One layer on pages beside the same keys and values as plain tensors, column by column."""

    def __init__(
        self,
        rows: int,
        block_size: int,
        window: int | None = None,
        starts: list[int] | None = None,
        expected: int = 0,
        dims: tuple[int, int] = (8, 6),
        kernels: str = "auto",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.memory = Memory()
        kind = Full() if window is None else Window(window)
        self.group = self.memory.group(kind, CacheConfig(block_size=block_size, kernels=kernels), 1, 1.0)
        self.make = {"device": device, "dtype": dtype}
        self.dims = dims
        self.rows = Rows(self.group)
        self.rows.starts, self.rows.expected_columns = starts, expected
        self.count, self.window = rows, window
        self.keys, self.values = (torch.empty(rows, HEADS, 0, dim, **self.make) for dim in dims)

    def step(self, new: int) -> Pages:
        keys, values = (torch.randn(self.count, HEADS, new, dim, **self.make) for dim in self.dims)
        self.group.place(0, Layout.of(keys, values))
        batch = self.rows.extend(self.count, new)
        made, index = self.group.store(0)
        pages = made.pages(index, batch)
        pages.ops.write(pages, keys, values)
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.group.pool.check()
        return pages

    def reorder(self, sources: list[int]) -> None:
        self.rows.reorder(sources)
        self.keys, self.values, self.count = self.keys[sources], self.values[sources], len(sources)

    def crop(self, columns: int) -> None:
        self.rows.crop(columns)
        kept = self.keys.shape[2] - columns
        self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]

    def change(self, data: st.DataObject, new: int) -> None:
        """Reorder, fork or crop the rows behind a step of so many columns, or leave them; the books add up."""
        move = data.draw(st.sampled_from(["on", "reorder", "fork", "crop"]))
        if move == "reorder":
            rows = st.integers(0, self.count - 1)
            self.reorder(data.draw(st.lists(rows, min_size=self.count, max_size=self.count)))
        elif move == "fork" and self.count < 6:
            self.reorder([row for row in range(self.count) for _ in range(2)])
        elif move == "crop" and (self.window is None or self.rows.keep_past):
            # Behind a window the past is kept back to the last crop, no further.
            self.crop(data.draw(st.integers(0, min(3, self.rows.columns - 1, new))))
        self.group.pool.check()

    def assert_attends(
        self, pages: Pages, query_heads: int, softcap: float | None, sinks: bool, tolerance: float = 1e-5
    ) -> None:
        """Attention of random queries agrees with the formula, through a gather and through whatever the ops
        do.
        """
        query = torch.randn(self.count, query_heads, pages.batch.new, self.dims[0], **self.make)
        sink = torch.randn(query_heads, **self.make) if sinks else None
        seen = Seen(pages.batch.first_visible(self.window), causal=True, window=self.window)
        out = pages.ops.attend(query, pages, seen, softcap=softcap, sinks=sink)
        expected = formula(query, self.keys, self.values, self.window, self.rows.starts, softcap, sink)
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def formula(
    query: Any,
    keys: Any,
    values: Any,
    window: int | None,
    starts: list[int] | None,
    softcap: float | None,
    sink: Any,
) -> torch.Tensor:
    """softmax(softcap(q k^T / sqrt(d))) v over what each token sees, in float64; nothing seen gives 0."""
    rows, query_heads, new, dim = query.shape
    columns = keys.shape[2]
    repeats = query_heads // keys.shape[1]
    scores = query.double() @ keys.double().repeat_interleave(repeats, 1).transpose(-1, -2) * dim**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(columns - new, columns, device=query.device)[:, None]
    column = torch.arange(columns, device=query.device)
    seen = (column <= at) & (column > at - (window or columns + 1))
    seen = seen & (column >= torch.tensor(starts or [0] * rows, device=query.device)[:, None])[:, None, None]
    weights = torch.where(seen, scores, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (0 if sink is None else sink.double().exp().view(1, -1, 1, 1))
    weights = torch.where(total > 0, weights / total, 0)
    return (weights @ values.double().repeat_interleave(repeats, 1)).transpose(1, 2).float()
