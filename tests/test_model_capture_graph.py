"""Captures of steps of generate() that fail, or replay wrongly: they cost no answer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import counts, kept, policy, reasons
from common_reads import read_common_blocks_once
from compare import assert_clean, assert_same
from tape import record

import hf_paged
from hf_paged.model.capture.graph import Graph
from hf_paged.model.lazy import NotCapturable
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS

NEW = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def _tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)


def replayed(model: Any) -> int:
    return counts(model)["replayed"]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("device"), IndexError("list"), AttributeError("name"), AssertionError(), KeyError("key")],
)
def test_a_capture_that_fails_costs_no_answer(
    error: Exception, llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setitem(RECORDERS, "cpu", fails)
    assert_same(llama, input_ids=ids, **NEW)
    assert type(error).__name__ in reasons(llama)
    assert counts(llama) == {"refused": 1}


def test_a_capture_that_fails_holds_no_cache(
    llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: its blocks are back with the last reference to its cache, without a collection of garbage."""

    def fails(*_: Any) -> Any:
        raise NotCapturable("on purpose")

    monkeypatch.setitem(RECORDERS, "cpu", fails)
    cache = hf_paged.PagedCache(llama, block_size=4)
    gc.collect()
    gc.disable()
    try:
        llama.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **NEW)
        assert "on purpose" in reasons(llama)
        del cache
        assert memory_of(llama).held == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("place", ["prepare", "hand_out"])
def test_so_does_what_comes_before_and_after_it(
    place: str, llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no luck")

    monkeypatch.setattr(Graph, place, fails)
    assert_same(llama, input_ids=ids, **NEW)
    assert "no luck" in reasons(llama)
    assert not kept(llama)


def test_want_of_memory_is_not_for_ever(
    llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    policy(monkeypatch, later=12)
    monkeypatch.setitem(RECORDERS, "cpu", fails)
    assert_same(llama, input_ids=ids, **NEW)
    assert not reasons(llama)
    monkeypatch.setitem(RECORDERS, "cpu", record)
    for _ in range(3):
        assert_same(llama, input_ids=ids, **NEW)
    assert replayed(llama), reasons(llama)


def test_a_replay_that_differs_is_never_trusted(
    llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that succeeds proves nothing: this one forgets an operation (trap 1)."""

    def forgetful(step: Callable[[], Any], pools: Any, devices: Any) -> Any:
        replay, answer = record(step, pools, devices)
        return lambda: (replay(), answer.logits.mul_(1.5)), answer

    monkeypatch.setitem(RECORDERS, "cpu", forgetful)
    assert_same(llama, input_ids=ids, **NEW)
    assert not replayed(llama)
    assert "differs" in reasons(llama)


def test_an_interrupt_in_a_capture_reaches_the_user_and_leaves_nothing(
    llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = llama.config._attn_implementation

    def interrupted(step: Callable[[], Any], pools: Any, devices: Any) -> Any:
        step()
        raise KeyboardInterrupt

    monkeypatch.setitem(RECORDERS, "cpu", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llama.generate(ids, **NEW, cache_implementation="paged")
    assert_clean(llama, setting)
    monkeypatch.setitem(RECORDERS, "cpu", record)
    assert_same(llama, input_ids=ids, **NEW)


@pytest.mark.parametrize("padding", [0, 3])
def test_beams_read_common_blocks_once(
    padding: int, llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reordered in every step: in each layer of a replay, rows of a group have its blocks, and tokens are stock's."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    options = {
        "attention_mask": mask, "max_new_tokens": 40, "min_new_tokens": 40, "num_beams": 5, "do_sample": False,
    }  # fmt: skip
    expected = llama.generate(ids, **options)
    wrong = read_common_blocks_once(monkeypatch, with_adapters=False)
    for _ in range(2):
        config = {"block_size": 2, "shared_reads": "always"}
        found = llama.generate(ids, **options, cache_implementation="paged", cache_config=config)
        assert found.tolist() == expected.tolist()
    assert replayed(llama) > 40
    assert wrong == []
    memory_of(llama).check()
