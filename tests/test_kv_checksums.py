"""Checksums of blocks: every change of a byte is another sum, in any dtype and layout."""

from __future__ import annotations

import pytest
import torch

from hf_paged.blocks import Copy
from hf_paged.kv import Layout, Store, checksums
from hf_paged.kv.checksums import checksums as sums_of
from hf_paged.kv.checksums import flip_a_byte
from hf_paged.kv.layout import StateLayout
from hf_paged.kv.state_store import StateStore

CPU = torch.device("cpu")
BLOCKS = torch.tensor([3, 0, 5])
LAYOUTS = [
    Layout(CPU, torch.float32, 2, 8, 8),
    Layout(CPU, torch.bfloat16, 2, 8, 4),
    Layout(CPU, torch.float16, 1, 3, 1),  # rows of 6 bytes and of 2
    Layout(CPU, torch.float8_e4m3fn, 1, 5, 3),
    Layout(CPU, torch.float64, 1, 24, 0),  # latents without values
]


def filled(layout: Layout, size: int = 1) -> Store:
    store = Store(layout, 3, 6, size, "torch")
    for data in store.tensors:
        bytes_ = data.view(torch.uint8) if data.numel() else torch.empty(0, dtype=torch.uint8)
        bytes_.copy_(torch.randint(0, 256, bytes_.shape, dtype=torch.uint8))
    return store


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.dtype))
def test_each_byte_changes_the_sum_of_its_layer_and_block(layout: Layout) -> None:
    store = filled(layout)
    before = sums_of(store.by_block, BLOCKS)
    assert before.shape == (3, 3)
    for part in store.by_block if layout.value_dim else store.by_block[:1]:
        rows = part[1, 0].view(torch.uint8)
        for byte in range(len(rows)):
            rows[byte] ^= 0x80
            differ = sums_of(store.by_block, BLOCKS) != before
            assert differ.nonzero().tolist() == [[1, 1]], byte
            rows[byte] ^= 0x80
    assert torch.equal(sums_of(store.by_block, BLOCKS), before)


def test_signs_and_places_count() -> None:
    """Sums that only add up would not see two signs that change, words that change places, keys that become
    values.
    """
    store = filled(LAYOUTS[0])
    seen = {int(sums_of(store.by_block, BLOCKS[:1])[0, 0])}
    keys, values = (part[0, 3] for part in store.by_block)
    changes = (
        (keys, [1, 3], -keys[[1, 3]]),
        (keys, [1, 5], -keys[[1, 5]]),
        (keys, [1, 5], keys[[5, 1]]),
        (keys, slice(None), values.clone()),
        (values, slice(None), -values),
    )
    for part, where, content in changes:
        part[where] = content
        seen.add(int(sums_of(store.by_block, BLOCKS[:1])[0, 0]))
    assert len(seen) == 1 + len(changes)


def test_in_chunks_and_after_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(LAYOUTS[1], size=4)
    whole = sums_of(store.by_block, torch.arange(6))
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 100)
    assert torch.equal(sums_of(store.by_block, torch.arange(6)), whole)
    store.copy([Copy(2, 4)])
    assert torch.equal(sums_of(store.by_block, torch.tensor([4])), whole[:, 2:3])
    flip_a_byte(store, 4, layer=2, byte=7)
    assert (sums_of(store.by_block, torch.tensor([4])) == whole[:, 2:3]).tolist() == [[True], [True], [False]]


def test_recurrent_states() -> None:
    store = StateStore(StateLayout.of(torch.zeros(1, 3, 5)), 2, 6, "torch")
    store.data.normal_()
    before = sums_of(store.by_block, BLOCKS)
    flip_a_byte(store, 5, layer=1, byte=59)
    assert (sums_of(store.by_block, BLOCKS) != before).nonzero().tolist() == [[1, 2]]
