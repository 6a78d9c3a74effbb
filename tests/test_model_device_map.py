"""Accelerate's hooks: which only move tensors, where they are left out, and what moves with a step (C41).

Steps on several devices are those of tests/test_gpu.py; here every device is the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from captures import counts, policy, reasons
from engine_answers import PROMPTS, answers
from families import BY_NAME, build
from releases import FLAT_STATES
from tape import record
from torch import nn

from hf_paged.engine import Engine
from hf_paged.kv import StaticBatch, StaticSpans
from hf_paged.model.capture.fusion import is_norm
from hf_paged.model.device_map import HOOK, forwards_without_hooks, only_moves, runs_class_forward
from hf_paged.model.dispatch import KNOWN, has_foreign_code
from hf_paged.model.lazy import LazyMask
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.switch import modules_of

META = torch.device("meta")
CPU = torch.device("cpu")
GREEDY = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}


def dispatched(name: str = "llama") -> Any:
    """A model whose layers have accelerate's hooks, as over several devices."""
    known = name in BY_NAME
    model = build(BY_NAME[name]) if known else tiny.build("causal", tiny.config_class("causal", name))
    parts = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"]
    parts += [f"model.layers.{i}" for i in range(len(model.model.layers))]
    return dispatch_model(model, dict.fromkeys(parts, "cpu"), main_device="cpu", force_hooks=True)


def hooked(module: nn.Module) -> list[nn.Module]:
    return [each for each in module.modules() if HOOK in each.__dict__]


def test_blocks_keep_their_hooks() -> None:
    """Hooks inside a block are left out, the block's own is not: it moves what all of them are given."""
    model = dispatched()
    layers = model.model.layers
    without = forwards_without_hooks(modules_of(model))
    inside = [each for layer in layers for each in hooked(layer) if each is not layer]
    assert inside
    assert {id(each.module) for each in without} == {id(each) for each in inside}
    before = {id(each): each.__dict__["forward"] for each in inside}
    norm = layers[0].input_layernorm
    assert not is_norm(norm)
    for each in without:
        each.replace()
    assert is_norm(norm)
    assert all(map(runs_class_forward, inside))
    assert not runs_class_forward(layers[0])
    for each in without:
        each.restore()
    assert {id(each): each.__dict__["forward"] for each in inside} == before


class _Doubles(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return 2 * output


@pytest.mark.parametrize("spoiled", ["another place", "one more hook", "a forward of the user's"])
def test_a_block_with_more_in_it_keeps_all_of_them(spoiled: str) -> None:
    model = dispatched()
    first, second = model.model.layers
    part = first.mlp.down_proj
    if spoiled == "another place":
        part.__dict__[HOOK].execution_device = "cuda:1"
    elif spoiled == "one more hook":
        add_hook_to_module(part, _Doubles(), append=True)
    else:
        moved = part.forward
        part.forward = lambda x: 2 * moved(x)
    found = {id(each.module) for each in forwards_without_hooks(modules_of(model))}
    assert found == {id(each) for each in hooked(second) if each is not second}
    assert spoiled == "another place" or has_foreign_code([*model.modules()], KNOWN)
    assert only_moves(part) is (spoiled == "another place")


def test_moving_is_no_foreign_code() -> None:
    assert not has_foreign_code([*dispatched().modules()], KNOWN)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "gpt-oss", pytest.param("qwen3_5_text", marks=FLAT_STATES)]
)
def test_captured_steps_of_hooked_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate() and the engine replay steps of such a model, with stock's tokens, and leave every hook."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    model = dispatched(name)
    before = [each.__dict__["forward"] for each in hooked(model)]
    expected = []
    for prompt in PROMPTS[:3]:
        ids = torch.tensor([prompt])
        stock = model.generate(ids, **GREEDY)
        assert torch.equal(model.generate(ids, **GREEDY, cache_implementation="paged"), stock)
        expected.append([stock[0, len(prompt) :].tolist()])
    assert counts(model)["replayed"] > 5, reasons(model)
    with Engine(model, block_size=4) as engine:
        outputs = engine.generate(PROMPTS[:3], **GREEDY)
        engine.check()
        assert counts(engine)["replayed"] > 4, reasons(engine)
    assert [answers(output) for output in outputs] == expected
    assert [each.__dict__["forward"] for each in hooked(model)] == before


def test_masks_move_without_being_made() -> None:
    def build() -> torch.Tensor:
        raise AssertionError("nobody reads it")

    mask = LazyMask((2, 1, 1, 9), torch.bool, CPU, 5, build, lambda: None)
    with torch.no_grad():
        moved = mask.to(META)
    assert isinstance(moved, LazyMask)
    assert (moved.device, moved.shape, moved.window) == (META, mask.shape, 5)
    assert moved.as_stock() is None


@pytest.mark.parametrize("spans", [False, True], ids=["rows", "spans"])
def test_a_step_is_copied_once_for_another_device(spans: bool) -> None:
    """Its tensors are the same for all layers there, and others in the next step."""
    batch = StaticSpans(4, 4, 2, 4, 8, CPU) if spans else StaticBatch(4, 1, 2, 4, 8, CPU)
    batch.begin(lambda *_: None)
    lengths = batch.lengths(META)
    assert lengths.device == META
    assert batch.lengths(META) is lengths
    assert batch.lengths(CPU) is batch.seen
    assert batch.targets(META).device == batch.table(META).device == META
    assert batch.visible(0, None, META).device == batch.slots(0, META).device == META
    if spans:
        there, here = batch.spans_on(META), batch.spans_on(CPU)
        assert {part.device for part in there} == {META}
        assert here == batch.spans
    batch.begin(lambda *_: None)
    assert batch.lengths(META) is not lengths
