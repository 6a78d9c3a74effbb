"""Captured steps without a GPU: a tape stands in for CUDA graphs. Same tokens, and the graph was really what
made them.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from captures import counts, drop, policy, reasons
from cases import once_each
from compare import assert_clean, assert_equal, both
from families import BY_NAME, VOCABULARY, build
from kernel_cases import load
from modes import MODES, supported
from tape import record, rerun

from hf_paged.kv import ops
from hf_paged.model.rehearsal import RECORDERS

EAGER = {("gemma3", "prompt-lookup"), ("bart", "assisted")}
"""Calls of all kinds: padding that is stored, positions that are made on the host; and rounds that are all
different.
"""


@pytest.fixture(autouse=True)
def _tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", record)


def prompts(rows: int = 3, columns: int = 13) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("name", "mode"),
    [*once_each(["llama"], [*MODES]), *once_each(["gemma3", "gpt-oss", "bart", "gemma3"], [*MODES])[::2]],
)
def test_same_tokens_from_replays(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_NAME[name]
    if not supported(mode, family.seq2seq):
        pytest.skip("stock cannot do this mode with an encoder-decoder")
    if name == "gpt-oss" and mode == "assisted":
        pytest.skip("stock's own sliding cache breaks when an assistant drafts several tokens")
    policy(monkeypatch, least_steps=4)
    model = build(family)
    object.__setattr__(model, "assistant", build(family))
    setting = model.config._attn_implementation
    arguments: dict[str, Any] = {"input_ids": prompts()} | MODES[mode](model, prompts())
    stock, paged = both(model, **arguments)
    assert_equal(stock, paged)
    assert counts(model)["replayed"] or (name, mode) in EAGER, reasons(model)
    del stock, paged
    assert_clean(model, setting)


@pytest.mark.parametrize(
    ("name", "padded", "call"),
    [
        ("llama", True, {"num_beams": 2}),
        ("qwen3", False, {}),
        ("gemma3", True, {}),
        ("phi3", False, {}),
    ],
    ids=["llama-padded-beams", "qwen3", "gemma3-padded", "phi3"],
)
def test_kernels_and_fused_modules(
    name: str, padded: bool, call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the interpreter the kernels of a captured step and the fused modules give stock's tokens."""
    policy(monkeypatch, least_steps=4)
    monkeypatch.setattr(ops, "why_no_kernels", lambda layout: None)
    monkeypatch.setitem(sys.modules, "hf_paged_kernels", load())
    monkeypatch.setitem(RECORDERS, "cpu", rerun)
    model = build(BY_NAME[name])
    setting = model.config._attn_implementation
    ids = prompts(2, 7)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    stock, paged = both(model, input_ids=ids, attention_mask=mask, max_new_tokens=7, do_sample=False, **call)
    assert_equal(stock, paged)
    assert counts(model)["replayed"] >= 2, reasons(model)
    del paged
    drop(model)  # a rerun holds the cache, unlike a graph
    gc.collect()
    assert_clean(model, setting)


@pytest.mark.parametrize("name", ["falcon", "llama"])
def test_kernels_launched_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same outside captured steps, dense copies and padding included; beams fork, so no row lies
    alone.
    """
    monkeypatch.setattr(ops, "why_no_kernels", lambda layout: None)
    monkeypatch.setitem(sys.modules, "hf_paged_kernels", load())
    called = []
    gather = load().gather
    monkeypatch.setattr(load(), "gather", lambda *given: called.append(1) or gather(*given))
    model = build(BY_NAME[name])
    ids = prompts(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    call = {
        "max_new_tokens": 5,
        "do_sample": False,
        "num_beams": 2,
        "output_attentions": True,
        "return_dict_in_generate": True,
    }
    if name == "llama":
        model.set_attn_implementation("eager")
    stock = model.generate(ids, attention_mask=mask, **call)
    options = {"block_size": 4, "kernels": "triton", "graphs": False}
    paged = model.generate(
        ids, attention_mask=mask, **call, cache_implementation="paged", cache_config=options
    )
    assert torch.equal(stock.sequences, paged.sequences)
    assert called
