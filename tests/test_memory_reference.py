"""Attention in plain torch against a float64 formula, over pools that are NaN wherever nothing was written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.config import CacheConfig
from hf_paged.memory import Kind, Layout, Memory, Pages, Rows, reference, store

HEADS, DIM, VALUE_DIM = 2, 8, 6


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that nobody wrote is NaN: reading it shows."""
    original = store._empty
    monkeypatch.setattr(store, "_empty", lambda *arguments: original(*arguments).fill_(torch.nan))


class Paged:
    """One layer on pages beside the same keys and values as plain tensors, column by column."""

    def __init__(self, rows: int, block_size: int, window: int | None = None, starts: list[int] | None = None, expected: int = 0) -> None:
        self.memory = Memory()
        kind = Kind("full") if window is None else Kind("window", window)
        self.group = self.memory.group(kind, CacheConfig(block_size=block_size), 1, 1.0)
        self.rows = Rows(self.group)
        self.rows.starts, self.rows.expected_columns = starts, expected
        self.count, self.window = rows, window
        self.keys = torch.empty(rows, HEADS, 0, DIM)
        self.values = torch.empty(rows, HEADS, 0, VALUE_DIM)

    def step(self, new: int) -> Pages:
        keys, values = torch.randn(self.count, HEADS, new, DIM), torch.randn(self.count, HEADS, new, VALUE_DIM)
        self.group.place(0, Layout.of(keys, values))
        batch = self.rows.extend(self.count, new)
        made, index = self.group.store(0)
        pages = Pages(*made.of_layer[index], batch)
        reference.write(pages, keys, values)
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

    def assert_attends(self, pages: Pages, query_heads: int, softcap: float | None, sinks: bool) -> None:
        batch, query = pages.batch, torch.randn(self.count, query_heads, pages.batch.new, DIM)
        sink = torch.randn(query_heads) if sinks else None
        first = batch.first_visible(self.window)
        keys, values = (reference.gather(data, batch, first) for data in (pages.keys, pages.values))
        mask = batch.visible(first, self.window, query.device)
        out = reference.attend(query, keys, values, mask, softcap=softcap, sinks=sink)
        expected = formula(query, self.keys, self.values, self.window, self.rows.starts, softcap, sink)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def formula(
    query: Any, keys: Any, values: Any, window: int | None, starts: list[int] | None, softcap: float | None, sink: Any
) -> torch.Tensor:
    """softmax(softcap(q k^T / sqrt(d))) v over what each token sees, in float64; nothing seen gives 0."""
    rows, query_heads, new, dim = query.shape
    columns = keys.shape[2]
    repeats = query_heads // keys.shape[1]
    scores = query.double() @ keys.double().repeat_interleave(repeats, 1).transpose(-1, -2) * dim**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(columns - new, columns)[:, None]
    column = torch.arange(columns)
    seen = (column <= at) & (column > at - (window or columns + 1))
    seen = seen & (column >= torch.tensor(starts or [0] * rows)[:, None])[:, None, None]
    weights = torch.where(seen, scores, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (0 if sink is None else sink.double().exp().view(1, -1, 1, 1))
    weights = torch.where(total > 0, weights / total, 0)
    return (weights @ values.double().repeat_interleave(repeats, 1)).transpose(1, 2).float()


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_attention_over_any_history(data: st.DataObject) -> None:
    """C3, C10, C14: appends, forks, reorders and crops in any order, over any block size, window and padding."""
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    count = data.draw(st.integers(1, 3))
    window = data.draw(st.sampled_from([None, None, 1, 3, 7]))
    starts = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=count, max_size=count))
    paged = Paged(count, data.draw(st.sampled_from([1, 2, 4, 16])), window, starts, data.draw(st.sampled_from([0, 40])))
    paged.rows.keep_past = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 6))):
        pages = paged.step(data.draw(st.sampled_from([1, 1, 1, 2, 5, 9])))
        paged.assert_attends(
            pages, data.draw(st.sampled_from([2, 4, 6])), data.draw(st.sampled_from([None, 3.0])), data.draw(st.booleans())
        )
        move = data.draw(st.sampled_from(["on", "reorder", "fork", "crop"]))
        if move == "reorder":
            paged.reorder(data.draw(st.lists(st.integers(0, paged.count - 1), min_size=paged.count, max_size=paged.count)))
        elif move == "fork" and paged.count < 6:
            paged.reorder([row for row in range(paged.count) for _ in range(2)])
        elif move == "crop" and (window is None or paged.rows.keep_past):
            paged.crop(data.draw(st.integers(0, min(3, paged.rows.columns - 1))))
        paged.group.pool.check()
    paged.rows.free()
    assert paged.group.pool.held == 0


def test_rows_side_by_side_are_a_view() -> None:
    """A batch without padding or forks is read in place: no gather."""
    paged = Paged(3, 4, expected=40)
    for new in (9, 1, 1, 6):
        pages = paged.step(new)
        assert pages.batch.lane is not None
        assert reference.gather(pages.keys, pages.batch, 0).untyped_storage().data_ptr() == pages.keys.untyped_storage().data_ptr()
        paged.assert_attends(pages, 4, None, False)
    paged.reorder([1, 0, 2])
    assert paged.step(1).batch.lane is None


def test_scattered_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """C3: the order of ids means nothing."""
    paged = Paged(2, 4)
    from hf_paged.blocks import Table, append

    hole = [Table(paged.group.pool) for _ in range(3)]
    paged.step(1)
    paged.group.make_room(40, 40)
    append(hole, [5, 9, 3])
    for table in hole[::2]:
        table.free()
    for new in (7, 1, 5, 1):
        paged.assert_attends(paged.step(new), 4, None, False)
    assert paged.rows.tables[0].blocks != sorted(paged.rows.tables[0].blocks) or paged.rows.batch.lane is None
    hole[1].free()


def test_window_gives_blocks_back() -> None:
    """C10: ceil(W / B) + 1 blocks a row in the steady state."""
    paged = Paged(2, 4, window=10)
    paged.step(30)
    for _ in range(40):
        paged.assert_attends(paged.step(1), 2, None, False)
        assert all(len(table.blocks) <= -(-10 // 4) + 1 for table in paged.rows.tables)


def test_going_back_over_the_window_is_refused() -> None:
    paged = Paged(1, 4, window=6)
    paged.step(20)
    paged.step(1)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        paged.rows.crop(8)
    paged.assert_attends(paged.step(1), 2, None, False)


def test_masks_with_heads_and_biases() -> None:
    """A bias of its own for every query head, folded with the heads."""
    query, keys, values = torch.randn(2, 6, 3, DIM), torch.randn(2, HEADS, 5, DIM), torch.randn(2, HEADS, 5, VALUE_DIM)
    bias = torch.randn(1, 6, 3, 5)
    out = reference.attend(query, keys, values, bias)
    weights = (query @ keys.repeat_interleave(3, 1).transpose(-1, -2) * DIM**-0.5 + bias).softmax(-1)
    torch.testing.assert_close(out, (weights @ values.repeat_interleave(3, 1)).transpose(1, 2), atol=1e-5, rtol=1e-5)
