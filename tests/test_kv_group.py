"""Pools: sizes, growth, layouts, and what goes back when."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from families import BY_NAME, build

import hf_paged
from hf_paged.blocks import Full
from hf_paged.kv import Layout, Memory, Rows
from hf_paged.kv import group as group_module
from hf_paged.kv.config import CacheConfig
from hf_paged.model.registry import memory_of

LAYOUT = Layout(torch.device("cpu"), torch.float32, 2, 8, 8)


def make(layers: int = 2, layout: Layout = LAYOUT, **options: Any) -> tuple[Memory, Any]:
    memory = Memory()
    group = memory.group(Full(), CacheConfig(**options), layers, 1.0)
    for layer in range(layers):
        group.place(layer, layout)
    return memory, group


def test_bytes_of_a_block() -> None:
    """C5: B * heads * (k_dim + v_dim) * layers * itemsize, and OPT-13B's 819,200 bytes a token."""
    memory = Memory()
    group = memory.group(Full(), CacheConfig(block_size=1), 40, 1.0)
    group.place(0, Layout(torch.device("cpu"), torch.float16, 40, 128, 128))
    assert group.block_bytes == 819_200


def test_books_that_the_host_cannot_keep(llama: Any) -> None:
    """More blocks than there is memory for the bookkeeping of: an error at once, and the call's neighbours do not
    notice.
    """
    with pytest.raises(hf_paged.OutOfBlocks, match="the bookkeeping of 1000000000000 blocks does not fit"):
        llama.generate(
            torch.tensor([[5, 6]]),
            max_new_tokens=2,
            cache_implementation="paged",
            cache_config={"num_blocks": 10**12},
        )
    assert llama.generate(torch.tensor([[5, 6]]), max_new_tokens=2, cache_implementation="paged").shape == (
        1,
        4,
    )


def test_one_allocation_for_layers_of_one_layout() -> None:
    """C5: keys and values of all layers of a group are one buffer."""
    _, group = make(layers=3, num_blocks=4)
    stores = [group.store(layer) for layer in range(3)]
    assert len({id(store) for store, _ in stores}) == 1
    assert [index for _, index in stores] == [0, 1, 2]
    assert group.bytes == 4 * group.block_bytes
    assert stores[0][0].keys.untyped_storage().data_ptr() == stores[0][0].values.untyped_storage().data_ptr()


def test_layers_of_different_layouts_share_the_tables() -> None:
    """Other widths mean another store under the same block ids."""
    memory = Memory()
    group = memory.group(Full(), CacheConfig(num_blocks=4), 3, 1.0)
    wide = LAYOUT._replace(heads=4)
    for layer, layout in enumerate((LAYOUT, wide, LAYOUT)):
        group.place(layer, layout)
    (first, a), (second, b), (third, c) = (group.store(layer) for layer in range(3))
    assert first is third
    assert first is not second
    assert (a, b, c) == (0, 0, 1)
    assert second.keys.shape[2] == 4


def test_layers_are_looked_at_in_every_step() -> None:
    """A layer that holds tokens and comes back with another shape or dtype is refused; as long as it holds
    none it may change.
    """
    _, group = make(layers=1, num_blocks=4)
    rows, like = Rows(group), torch.zeros(1, 2, 1, 8)
    group.look_at(0, like.double(), like)
    group.look_at(0, like, like)
    rows.extend(1, 1)
    group.look_at(0, like, like)
    for keys, values in (
        (like.double(), like),
        (like, like.double()),
        (like[:, :1], like[:, :1]),
        (like[..., :4], like),
        (like, like[..., :4]),
    ):
        with pytest.raises(ValueError, match="layer 0 holds keys and values like"):
            group.look_at(0, keys, values)
    rows.free()


def test_growth_keeps_the_content(caplog: pytest.LogCaptureFixture) -> None:
    """C5: a pool that grows around held blocks moves every slot with its content, and says so."""
    _, group = make(block_size=4)
    rows = Rows(group)
    rows.extend(1, 4)
    store, _ = group.store(0)
    store.keys.normal_()
    store.values.normal_()
    before = store.keys.clone()
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        Rows(group).extend(5, 40)
    assert group.store(0)[0] is store
    assert torch.equal(store.keys[:, : before.shape[1]], before)
    assert "grows from" in caplog.text


def test_no_memory_is_out_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation that fails says what it was for; the rows are as before."""

    def fail(*arguments: object) -> None:
        raise MemoryError("no")

    _, group = make()
    monkeypatch.setattr("hf_paged.kv.store.allocate", fail)
    rows = Rows(group)
    rows.extend(1, 4)
    with pytest.raises(hf_paged.OutOfBlocks, match="no memory for a pool of"):
        group.store(0)


def test_the_error_names_what_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that wait for their next call, as an engine's do."""

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no")

    memory, group = make(block_size=4)
    other = memory.group(Full(), CacheConfig(block_size=8, num_blocks=3), 1, 1.0, owner=object())
    other.place(0, LAYOUT)
    store, _ = other.store(0)
    monkeypatch.setattr("hf_paged.kv.store.allocate", fail)
    for held in (False, True):
        rows = Rows(other)
        rows.extend(1, int(held))
        Rows(group).extend(1, 4)
        with pytest.raises(hf_paged.OutOfBlocks) as failed:
            group.store(0)
        assert (f"gives back {store.bytes} bytes of its idle pools" in str(failed.value)) is not held
        rows.free()


def test_memory_that_is_short_for_twice_as_much_and_for_the_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth that fails twice is the pool's own error, and what was there stays."""

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no")

    _, group = make(num_blocks=9)
    group.reserved = 2
    group.back(2)
    store, _ = group.store(0)
    monkeypatch.setattr("hf_paged.kv.store.allocate", fail)
    with pytest.raises(hf_paged.OutOfBlocks, match="no memory for a pool of 3 blocks"):
        group.back(3)
    assert (group.backed, group.store(0)[0], store.blocks) == (2, store, 2)


def test_ahead_of_need_only_what_is_affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that may become very long does not take the device's memory before it does."""
    _, group = make(block_size=4)
    monkeypatch.setattr(group_module, "free_bytes", lambda device: 100 * group.block_bytes)
    rows = Rows(group)
    rows.expected_columns = 1_000_000
    rows.extend(2, 8)
    assert group.pool.total == 50
    for _ in range(60):
        rows.extend(2, 8)
    assert group.pool.total >= 2 * 61 * 2


def test_what_a_call_needs_is_there_at_once_if_it_would_have_no_room_to_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than half of the memory: the pool could not grow beside itself."""
    _, group = make(block_size=4)
    monkeypatch.setattr(group_module, "free_bytes", lambda device: 100 * group.block_bytes)
    rows = Rows(group)
    rows.expected_columns = 35 * 4
    rows.extend(2, 8)
    assert group.pool.total == 70


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group on a device with room for 100 of its blocks."""
    _, group = make(block_size=4, layout=LAYOUT._replace(device=torch.device("cpu:0")))
    taken: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def free(device: torch.device) -> int:
        return 10**6 if device.index is None else 100 * group.block_bytes - sum(taken.values())

    def allocate(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if elements * dtype.itemsize > free(device):
            raise torch.OutOfMemoryError("no")
        made = torch.empty(elements, dtype=dtype, device=device)
        if device.index is not None:
            taken[made.untyped_storage()] = made.nbytes
        return made

    monkeypatch.setattr(group_module, "free_bytes", free)
    monkeypatch.setattr("hf_paged.kv.store.allocate", allocate)
    return group


def test_a_pool_of_more_than_half_moves_by_way_of_the_host(
    small_device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory for one pool is enough: the content waits on the host while the pool moves."""
    group, rows = small_device, Rows(small_device)
    rows.extend(2, 8)
    store, _ = group.store(0)
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        while group.pool.held < 90:
            before = store.keys[:, : 4 * group.pool.total].normal_().clone()
            rows.extend(2, 8)
            assert torch.equal(store.keys[:, : before.shape[1]], before)
    assert "by way of the host" in caplog.text
    assert caplog.text.count("grows from") < 12
    with pytest.raises(hf_paged.OutOfBlocks, match="no memory for a pool of"):
        rows.extend(2, 20 * 4)
    assert store.blocks == group.pool.total
    assert torch.equal(store.keys[:, : before.shape[1]], before)


def test_finalizers_only_note(llama: Any, ids: torch.Tensor) -> None:
    """Trap 14: a cache that dies frees its blocks at the next operation, and OutOfBlocks collects garbage
    first.
    """
    options = {"num_blocks": 8, "block_size": 16}
    first = hf_paged.PagedCache(llama, **options)
    cycle = [first]
    cycle.append(cycle)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    llama.generate(ids, past_key_values=first, **call)
    gone = weakref.ref(first)
    gc.disable()
    try:
        del first, cycle
        assert gone() is not None
        llama.generate(ids, past_key_values=hf_paged.PagedCache(llama, **options), **call)
    finally:
        gc.enable()
    assert gone() is None
    assert memory_of(llama).held == 0


def test_allocated_under_inference_mode(llama: Any, ids: torch.Tensor) -> None:
    """Trap 13: a pool made under inference_mode is written outside it."""
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "cache_implementation": "paged"}
    with torch.inference_mode():
        inside = llama.generate(ids, **call)
    assert torch.equal(inside, llama.generate(ids, **call))


def test_other_options_get_another_pool(llama: Any, ids: torch.Tensor) -> None:
    """Nobody's choice changes a pool that somebody else uses."""
    kept = hf_paged.PagedCache(llama, block_size=4)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4}
    history = llama.generate(ids, past_key_values=kept, **call)
    llama.generate(ids, cache_implementation="paged", cache_config={"block_size": 8}, **call)
    longer = torch.cat([history, ids], 1)
    call["attention_mask"] = torch.ones_like(longer)
    assert torch.equal(llama.generate(longer, past_key_values=kept, **call), llama.generate(longer, **call))
    assert {config.block_size for _, config, _ in memory_of(llama).groups} == {4, 8}


def test_memory_goes_with_the_model(ids: torch.Tensor) -> None:
    """The registry keeps no model alive."""
    model = build(BY_NAME["qwen2"])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, cache_implementation="paged")
    gone, memory = weakref.ref(model), weakref.ref(memory_of(model))
    del model
    gc.collect()
    assert gone() is None
    assert memory() is None
