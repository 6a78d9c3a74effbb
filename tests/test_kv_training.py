"""Pools and captured steps while a model trains between rollouts (C5): what stays, what makes way, and why."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from captures import counts, kept, policy
from compare import both
from families import BY_NAME, build
from tape import record

import hf_paged
from hf_paged.kv import training
from hf_paged.kv.training import TrainingMemory
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS

NEW = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
GPU = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A device whose memory is numbers."""
    numbers = {"free": 1000, "allocated": 100, "peak": 150}
    monkeypatch.setattr(training, "free_bytes", lambda device: numbers["free"])
    monkeypatch.setattr(training, "allocated_bytes", lambda device: numbers["allocated"])
    monkeypatch.setattr(training, "peak_bytes", lambda device: numbers["peak"])
    return numbers


def test_before_training_was_seen_an_eighth_may_stay(device: dict[str, int]) -> None:
    memory = TrainingMemory()
    assert memory.why_no_room({GPU: 125}) is None
    assert "an eighth" in str(memory.why_no_room({GPU: 126}))
    assert memory.why_no_room({}) is None


def test_the_peak_of_training_decides(device: dict[str, int]) -> None:
    memory = TrainingMemory()
    memory.begin([GPU])
    device["peak"] = 700
    memory.end()
    device["free"] = 640  # beside the pools
    assert memory.why_no_room({GPU: 360}) is None
    device["free"] = 620  # 600 were taken, and batches differ
    assert "600 bytes" in str(memory.why_no_room({GPU: 380}))


def test_a_peak_from_before_is_a_bound(device: dict[str, int]) -> None:
    """Allocations from before training bound how much it has taken; a peak that is seen counts more."""
    memory = TrainingMemory()
    device["peak"] = 900
    memory.begin([GPU])
    memory.end()
    device["free"] = 700
    assert memory.why_no_room({GPU: 1}) is not None
    device["peak"] = 150
    memory = TrainingMemory()
    for peak in (500, 500):
        memory.begin([GPU])
        device["peak"] = peak
        memory.end()
    device["free"] = 430
    assert memory.why_no_room({GPU: 1}) is None


def step(model: Any, ids: torch.Tensor) -> None:
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()


def ask(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    stock, paged = both(model, input_ids=ids, cache_config=options, **NEW)
    assert torch.equal(stock, paged)
    return paged


@pytest.mark.parametrize("keep", [None, True, False])
def test_captured_steps_survive_training_with_their_pools(
    keep: bool | None, llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rollout replays from its first step; no token is stale after weights were written in place."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    llama.train()
    word = {"cache_implementation": "paged", "cache_config": {"keep_pools": keep}}
    with torch.no_grad():
        llama.generate(ids, **NEW, **word)
    before = counts(llama)["replayed"]
    for _ in range(3):
        step(llama, ids)
        assert bool(memory_of(llama).bytes) is (keep is not False)
        assert bool(kept(llama)) is (keep is not False)
        answer = llama.generate(ids, **NEW, **word)
        assert torch.equal(answer, llama.generate(ids, **NEW))
    if keep is not False:
        assert counts(llama)["captured"] == 1
        assert counts(llama)["replayed"] == before + 3 * (NEW["max_new_tokens"] - 1)
    assert hf_paged.release(llama) > 0
    assert kept(llama) == 0
    assert memory_of(llama).bytes == 0


def test_pools_that_do_not_fit_make_way_with_one_line(
    llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(training, "free_bytes", lambda device: 1000)
    for _ in range(2):
        llama.eval()
        llama.generate(ids, **NEW, cache_implementation="paged")
        assert memory_of(llama).bytes > 125
        step(llama.train(), ids)
        assert memory_of(llama).bytes == 0
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "keep_pools=True keeps them" in lines[0]


def test_prefixes_of_pools_that_stay_are_forgotten(llama: Any, ids: torch.Tensor) -> None:
    """Else a pool that grows rather than forget would keep every state of the weights."""
    sizes = []
    for _ in range(4):
        llama.generate(ids, **NEW, cache_implementation="paged", cache_config={"prefix_caching": True})
        sizes.append(hf_paged.stats(llama).blocks)
        assert hf_paged.stats(llama).cached
        step(llama.train(), ids)
        assert hf_paged.stats(llama).cached == 0
        llama.eval()
    assert len(set(sizes)) == 1


def test_a_value_of_keep_pools_is_checked(llama: Any) -> None:
    with pytest.raises(TypeError, match="keep_pools must be True, False or None"):
        hf_paged.PagedCache(llama, keep_pools="yes")
    with pytest.raises(TypeError, match="keep_pools must be True, False or None"):
        hf_paged.Engine(llama, keep_pools=1)


def test_gradient_checkpointing_between_rollouts_keeps_captured_steps(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers turn it off while they generate, and mark the embeddings' outputs for adapters."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    llama = build(BY_NAME["llama"]).train()
    llama.enable_input_require_grads()
    for _ in range(3):
        llama.gradient_checkpointing_enable({"use_reentrant": False})
        step(llama, ids)
        llama.gradient_checkpointing_disable()
        with torch.no_grad():
            paged = llama.generate(ids, **NEW, cache_implementation="paged")
            assert torch.equal(paged, llama.generate(ids, **NEW))
    assert counts(llama)["captured"] == 1
    assert counts(llama)["replayed"] > 2 * (NEW["max_new_tokens"] - 1)
