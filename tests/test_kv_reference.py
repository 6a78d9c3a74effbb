"""Attention in plain torch against a float64 formula, over pools that are NaN wherever nothing was
written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_layer import HEADS, Paged, formula

from hf_paged.blocks import BlockTable, append
from hf_paged.kv import Layout, Seen, reference
from hf_paged.kv.upload import upload

DIM, VALUE_DIM = 8, 6


@settings(max_examples=examples(60))
@given(data=st.data())
def test_attention_over_any_history(data: st.DataObject) -> None:
    """C3, C10, C14: appends, forks, reorders and crops in any order, over any block size, window and
    padding.
    """
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    count = data.draw(st.integers(1, 3))
    window = data.draw(st.sampled_from([None, None, 1, 3, 7]))
    starts = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=count, max_size=count))
    paged = Paged(
        count, data.draw(st.sampled_from([1, 2, 4, 16])), window, starts, data.draw(st.sampled_from([0, 40]))
    )
    paged.rows.keep_past = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 6))):
        pages = paged.step(data.draw(st.sampled_from([1, 1, 1, 2, 5, 9])))
        paged.assert_attends(
            pages,
            data.draw(st.sampled_from([2, 4, 6])),
            data.draw(st.sampled_from([None, 3.0])),
            data.draw(st.booleans()),
        )
        paged.change(data, pages.batch.new)
    paged.rows.free()
    assert paged.group.pool.held == 0


def test_rows_side_by_side_are_a_view() -> None:
    """A batch without padding or forks is read in place: no gather."""
    paged = Paged(3, 4, expected=40)
    for new in (9, 1, 1, 6):
        pages = paged.step(new)
        assert pages.batch.strided is not None
        assert (
            reference.gather(pages.keys, pages.batch, 0).untyped_storage().data_ptr()
            == pages.keys.untyped_storage().data_ptr()
        )
        paged.assert_attends(pages, 4, None, False)
    paged.reorder([1, 0, 2])
    assert paged.step(1).batch.strided is None


def test_scattered_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """C3: the order of ids means nothing."""
    paged = Paged(2, 4)
    hole = [BlockTable(paged.group.pool) for _ in range(3)]
    paged.step(1)
    paged.group.make_room(40, 40)
    append(hole, [5, 9, 3])
    for table in hole[::2]:
        table.free()
    for new in (7, 1, 5, 1):
        paged.assert_attends(paged.step(new), 4, None, False)
    assert (
        paged.rows.tables[0].blocks != sorted(paged.rows.tables[0].blocks) or paged.rows.batch.strided is None
    )
    hole[1].free()


def test_window_gives_blocks_back() -> None:
    """C10: ceil(W / B) + 1 blocks a row in the steady state."""
    paged = Paged(2, 4, window=10)
    paged.step(30)
    for _ in range(40):
        paged.assert_attends(paged.step(1), 2, None, False)
        assert all(len(table.blocks) <= -(-10 // 4) + 1 for table in paged.rows.tables)


def test_steps_within_a_last_block_of_ones_own() -> None:
    """C2, C14: they take no block and copy none; one who shares the block later is not written over."""
    paged = Paged(2, 8, expected=40)
    paged.step(9)
    blocks = [list(table.blocks) for table in paged.rows.tables]
    for new in (1, 2, 1):
        paged.assert_attends(paged.step(new), 4, None, False)
        assert [table.blocks for table in paged.rows.tables] == blocks
        assert [table.length for table in paged.rows.tables] == [paged.rows.columns] * 2
    twin = paged.rows.fork()
    paged.assert_attends(paged.step(1), 4, None, False)
    assert [table.blocks for table in twin.tables] == blocks
    assert all(table.blocks[-1] != old[-1] for table, old in zip(paged.rows.tables, blocks, strict=True))
    twin.free()
    with pytest.raises(ValueError, match="holds 2 rows and was given 3"):
        paged.rows.extend(3, 1)


@pytest.mark.parametrize("modes", [(True, False), (False, True)], ids=["inference first", "inference last"])
def test_views_of_a_step_serve_any_grad_mode(modes: tuple[bool, bool]) -> None:
    """The same rows at the same place, once in inference mode and once outside of it."""
    paged = Paged(2, 8, expected=40)
    for inference in modes:
        with torch.inference_mode(inference):
            paged.assert_attends(paged.step(9), 4, None, False)
        paged.rows.free()
        paged.keys, paged.values = paged.keys[:, :, :0].clone(), paged.values[:, :, :0].clone()


def test_going_back_over_the_window_is_refused() -> None:
    paged = Paged(1, 4, window=6)
    paged.step(20)
    paged.step(1)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        paged.rows.crop(8)
    paged.assert_attends(paged.step(1), 2, None, False)


def test_masks_with_heads_and_biases() -> None:
    """A bias of its own for every query head, folded with the heads."""
    query, keys, values = (
        torch.randn(2, 6, 3, DIM),
        torch.randn(2, HEADS, 5, DIM),
        torch.randn(2, HEADS, 5, VALUE_DIM),
    )
    bias = torch.randn(1, 6, 3, 5)
    out = reference.attend(query, keys, values, bias)
    weights = (query @ keys.repeat_interleave(3, 1).transpose(-1, -2) * DIM**-0.5 + bias).softmax(-1)
    torch.testing.assert_close(
        out, (weights @ values.repeat_interleave(3, 1)).transpose(1, 2), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("starts", [None, [0, 2]], ids=["whole", "padded"])
def test_values_without_a_width(starts: list[int] | None) -> None:
    """Latents without a part for positions: one half of the store has slots and no content."""
    paged = Paged(2, 4, starts=starts, dims=(8, 0))
    for new in (7, 1):
        pages = paged.step(new)
    paged.reorder([1, 1])
    pages = paged.step(2)
    found = reference.gather(pages.keys, pages.batch, 0)
    begin = 0 if starts is None else 2
    torch.testing.assert_close(found[:, :, begin:], paged.keys[:, :, begin:])
    assert reference.gather(pages.values, pages.batch, 0).shape == (2, HEADS, 10, 0)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("starts", [None, [0, 4, 9]], ids=["whole", "padded"])
def test_attention_over_latents(starts: list[int] | None, new: int) -> None:
    """One head of latents serves all heads of the query, as keys and as values; a token that sees nothing
    gives 0.
    """
    torch.manual_seed(5)
    paged = Paged(3, 4, starts=starts, dims=(8, 4))
    paged.keys, paged.values = paged.keys[:, :1], paged.values[:, :1]
    for count in (9 - new, new):
        keys, values = torch.randn(3, 1, count, 8), torch.randn(3, 1, count, 4)
        paged.group.place(0, Layout.of(keys, values))
        batch = paged.rows.extend(3, count)
        made, index = paged.group.store(0)
        pages = made.pages(index, batch)
        pages.ops.write(pages, keys, values)
        paged.keys, paged.values = torch.cat([paged.keys, keys], 2), torch.cat([paged.values, values], 2)
    query, rotated = torch.randn(3, 6, new, 8), torch.randn(3, 6, new, 4)
    both = torch.cat([query, rotated], 3)

    def attention(
        query: torch.Tensor, latents: torch.Tensor, rotary: torch.Tensor, mask: Any, scale: float
    ) -> torch.Tensor:
        out = reference.attend_latents(query[..., :8], query[..., 8:], latents, rotary, mask, scale)
        return out.transpose(1, 2)

    out = pages.ops.attend_latents(both, pages, Seen(0, causal=True), attention, 8, scale=12**-0.5)
    expected = formula(both, torch.cat([paged.keys, paged.values], 3), paged.keys, None, starts, None, None)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    everything = Seen(0, torch.ones(1, 1, new, 9, dtype=torch.bool))
    narrow = pages.ops.attend_latents(both, pages, everything, attention, 8, scale=12**-0.5)
    if starts is None and new == 1:
        torch.testing.assert_close(narrow, out)


@pytest.mark.parametrize("dtype", [torch.int32, torch.long, torch.float32])
@pytest.mark.parametrize("numbers", [[], [7], [-3, 2**31 - 1, 0], [[1, 2], [3, 4]], [True, False], range(3)])
def test_uploaded_as_torch_reads_them(numbers: Any, dtype: torch.dtype) -> None:
    found = upload(numbers, torch.device("cpu"), dtype)
    expected = torch.tensor(numbers, dtype=dtype)
    assert (found.dtype, found.shape, found.tolist()) == (dtype, expected.shape, expected.tolist())
    found += 1  # memory of its own, which may be written
    assert upload(numbers, torch.device("cpu"), dtype).tolist() == expected.tolist()


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises((OverflowError, RuntimeError)):
        upload([2**31], torch.device("cpu"), torch.int32)
