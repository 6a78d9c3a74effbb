"""Blocks that wait on the host: the same bytes come back, wherever they lay and whatever was done in between
(C30, C31).

On a CUDA device the same tests hold the streams: what is written right behind a swap must not be what was
swapped.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch

from hf_paged.blocks import Copy, Full
from hf_paged.kv import HostBlocks, LayerGroup, Layout, Memory, host
from hf_paged.kv.config import CacheConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = Layout(DEVICE, torch.float32, 2, 8, 8)
LAYOUTS = {
    "plain": [PLAIN] * 3,
    "widths": [PLAIN._replace(key_dim=12, value_dim=4)] * 2,
    "several": [PLAIN, PLAIN._replace(heads=3, value_dim=16), PLAIN, PLAIN._replace(dtype=torch.bfloat16)],
    "no values": [PLAIN._replace(heads=1, value_dim=0)] * 2,
}


def make(layouts: list[Layout], blocks: int = 24, most: int = 40) -> tuple[LayerGroup, HostBlocks]:
    """A group whose stores hold random numbers, and its room on the host."""
    group = Memory().group(Full(), CacheConfig(4, num_blocks=blocks), len(layouts), 1.0)
    for layer, layout in enumerate(layouts):
        group.place(layer, layout)
    for layer in range(len(layouts)):
        group.store(layer)
    for data in group.tensors:
        data.normal_()
    group.host = HostBlocks(group, most)
    return group, group.host


def content(group: LayerGroup, block: int) -> list[torch.Tensor]:
    """All that the layers hold of a block."""
    return [data[:, block * 4 : block * 4 + 4].clone() for data in group.tensors]


def books(on_host: HostBlocks, blocks: int) -> list[int]:
    """Blocks of the host, not in order."""
    assert on_host.reserve(blocks)
    taken = [on_host.pool.take() for _ in range(on_host.pool.available)]
    random.Random(1).shuffle(taken)
    for block in taken[blocks:]:
        on_host.pool.drop(block)
    return taken[:blocks]


@pytest.mark.parametrize("slab", [1 << 27, 3000], ids=["one slab", "slabs"])
@pytest.mark.parametrize("staging", [1 << 25, 1200], ids=["at once", "in parts"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_same_bytes_come_back(
    kind: str, slab: int, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To other blocks, in another order, after everything here was written over."""
    monkeypatch.setattr(host, "SLAB_BYTES", slab)
    monkeypatch.setattr(host, "STAGING_BYTES", staging)
    group, on_host = make(LAYOUTS[kind])
    sources = random.Random(0).sample(range(24), 15)
    before = [content(group, block) for block in sources]
    waiting = books(on_host, 15)
    on_host.out([Copy(*pair) for pair in zip(sources, waiting, strict=True)])
    for data in group.tensors:
        data.fill_(float("nan"))  # right behind it, on the stream of the steps
    targets = random.Random(2).sample(range(24), 15)
    order = random.Random(3).sample(range(15), 15)
    on_host.back([Copy(waiting[i], targets[i]) for i in order])
    for block, right in zip(targets, before, strict=True):
        assert all(torch.equal(found, each) for found, each in zip(content(group, block), right, strict=True))
    untouched = set(range(24)) - set(targets)
    assert all(bool(each.isnan().all()) for block in untouched for each in content(group, block))


def test_transfers_keep_their_order() -> None:
    """A place on the host that is emptied and filled again at once, time after time."""
    group, on_host = make(LAYOUTS["several"])
    (place, *_) = books(on_host, 1)
    for block in range(20):
        right = content(group, block)
        on_host.out([Copy(block, place)])
        on_host.back([Copy(place, 23)])
        assert all(torch.equal(found, each) for found, each in zip(content(group, 23), right, strict=True))


def test_memory_comes_in_slabs_up_to_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The books are never larger than the memory behind them."""
    group, on_host = make(LAYOUTS["plain"], most=10)
    monkeypatch.setattr(host, "SLAB_BYTES", 4 * group.block_bytes)
    group.host = on_host = HostBlocks(group, 10)
    assert (on_host.pool.total, on_host.bytes) == (0, 0)
    with caplog.at_level(logging.INFO, "hf_paged"):
        assert on_host.reserve(3)
    assert "4 swapped blocks of the full layers fit on the host now" in caplog.text
    assert (on_host.pool.total, on_host.bytes) == (4, 4 * group.block_bytes)
    assert on_host.reserve(4)
    assert on_host.pool.total == 4
    assert on_host.reserve(9)
    assert on_host.pool.total == 10
    assert not on_host.reserve(11)
    assert on_host.pool.total == 10


def test_a_host_without_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """C31: it is said once, there is no room, and what was there before goes on."""
    group, _ = make(LAYOUTS["plain"])
    monkeypatch.setattr(host, "SLAB_BYTES", 4 * group.block_bytes)
    on_host = HostBlocks(group, 40)
    assert on_host.reserve(4)
    right = content(group, 5)
    place = on_host.pool.take()
    on_host.out([Copy(5, place)])

    def nothing_left(*sizes: Any, **options: Any) -> torch.Tensor:
        raise MemoryError("not a byte")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", nothing_left)
        assert not on_host.reserve(4)
    assert on_host.reserve(3)
    assert not on_host.reserve(4)
    assert caplog.text.count("not a byte") == 1
    assert (on_host.most, on_host.pool.total) == (4, 4)
    on_host.back([Copy(place, 7)])
    assert all(torch.equal(found, each) for found, each in zip(content(group, 7), right, strict=True))


def test_what_is_given_back_comes_again() -> None:
    """With the group's tensors go those on the host; other layers may look otherwise then."""
    group, on_host = make(LAYOUTS["plain"])
    books(on_host, 5)
    before = on_host.bytes
    group.give_back()
    assert on_host.bytes == 0
    for layer in range(3):
        group.place(layer, PLAIN._replace(dtype=torch.bfloat16))
    for layer in range(3):
        group.store(layer)
    assert on_host.reserve(1)
    assert on_host.bytes == before // 2
    for data in group.tensors:
        data.normal_()
    right = content(group, 3)
    place = on_host.pool.take()
    on_host.out([Copy(3, place)])
    on_host.back([Copy(place, 4)])
    assert all(torch.equal(found, each) for found, each in zip(content(group, 4), right, strict=True))


def test_room_before_the_first_layer_was_stored() -> None:
    """The known shapes of layers are enough to take memory."""
    group, on_host = make(LAYOUTS["several"])
    group.resize(30)
    assert not group.stores
    assert on_host.reserve(7)
    taken = on_host.bytes
    for layer in range(4):
        group.store(layer)
    assert on_host.reserve(7)
    assert on_host.bytes == taken == on_host.pool.total * group.block_bytes


def test_transfers_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    group, on_host = make(LAYOUTS["plain"])
    places = books(on_host, 6)
    on_host.out([Copy(block, place) for block, place in enumerate(places)])
    on_host.back([Copy(place, block) for block, place in enumerate(places[:2])])
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    transfers = on_host.transfers()
    assert [(transfer.out, transfer.bytes) for transfer in transfers] == [
        (True, 6 * group.block_bytes),
        (False, 2 * group.block_bytes),
    ]
    assert all(transfer.exposed >= 0 and transfer.copied >= 0 for transfer in transfers)
    assert on_host.transfers() == []
