"""Layers with and without a window in blocks of different sizes: tables, hits and swaps go by each pool's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captures import counts, reasons
from cases import pairwise
from engine_answers import PROMPTS, alone, checked_answers, small_engine
from engine_parts import layer_groups
from families import BY_NAME, build
from tape import record

import hf_paged
from hf_paged.blocks import Window
from hf_paged.engine import Engine
from hf_paged.model.rehearsal import RECORDERS

GREEDY = {"max_new_tokens": 12, "do_sample": False}
TALK = [[*PROMPTS[3], *PROMPTS[1][:count]] for count in (0, 3, 9, 17)]
"""Prompts that begin alike."""


@pytest.fixture(params=[1, 2, 16], ids=lambda size: f"windows in blocks of {size}")
def window_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The block size of layers with a window; others have the option's."""
    monkeypatch.setattr(Window, "block_size", lambda kind, size: request.param)
    return request.param


@pytest.mark.parametrize(
    ("name", "preemption", "window_blocks"),
    pairwise(["gemma3", "qwen2-window"], ["recompute", "swap"], [1, 2, 16]),
    indirect=["window_blocks"],
)
def test_every_request_gets_its_own_tokens(name: str, preemption: str, window_blocks: int) -> None:
    """C23, C28 to C31: samples and beams too, cut in chunks, preempted, and continued from what is cached."""
    model = build(BY_NAME[name])
    kinds: list[dict[str, Any]] = [GREEDY, {**GREEDY, "num_beams": 3, "num_return_sequences": 2}]
    asked = [(prompt, kinds[i % 2]) for i, prompt in enumerate([*TALK, *PROMPTS, *TALK])]
    with small_engine(model, preemption=preemption) as engine:
        sizes = {group.kind.name: group.pool.block_size for group in layer_groups(engine)}
        assert sizes == {"full": 4, "window": window_blocks}
        handles = [engine.submit(prompt, **options) for prompt, options in asked]
        for _ in range(8):
            engine.step()
        engine.pause()
        engine.resume()
        found = checked_answers(engine, handles)
        assert engine.stats()["preemptions"] > 0
        assert any(output.cached_tokens for output in (handle.result() for handle in handles))
    for (prompt, options), tokens in zip(asked, found, strict=True):
        assert tokens == alone(model, prompt, **options)


def test_generate_reuses_prefixes(window_blocks: int) -> None:
    model = build(BY_NAME["gemma3"])
    paged = {"cache_implementation": "paged", "cache_config": {"block_size": 4, "prefix_caching": True}}
    for prompt in [*TALK, *TALK]:
        assert [
            model.generate(torch.tensor([prompt]), **GREEDY, **paged)[0, len(prompt) :].tolist()
        ] == alone(model, prompt, **GREEDY)
    assert hf_paged.stats(model).reused


def test_captured_steps_read_each_pool_in_its_blocks(
    window_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tape in place of a CUDA graph."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    model = build(BY_NAME["gemma3"])
    long = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    with Engine(model, block_size=4) as engine:
        handles = [engine.submit(prompt, **long) for prompt in TALK]
        found = checked_answers(engine, handles)
        assert counts(engine)["replayed"] > 4, reasons(engine)
    for prompt, tokens in zip(TALK, found, strict=True):
        assert tokens == alone(model, prompt, **long)
