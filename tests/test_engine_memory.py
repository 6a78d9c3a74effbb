"""The memory of an engine, foretold from a config: what an engine then takes (C11)."""

from __future__ import annotations

from itertools import chain
from typing import Any

import peft
import pytest
import tiny
import torch
from adapters import lora
from families import BY_NAME, build
from releases import NEEDS_SLOTS

from hf_paged.engine import Engine, EngineConfig
from hf_paged.engine.memory import EngineMemory, sized
from hf_paged.engine.worker import pools
from hf_paged.kv.budget import Room

GIB = 2**30


def model_of(family: str) -> Any:
    if family in BY_NAME:
        return build(BY_NAME[family])
    return tiny.build("causal", tiny.config_class("causal", family))


def outline(family: str, room: Room, **options: Any) -> EngineMemory:
    """The memory that is foretold from a model's config alone."""
    filled = model_of(family)
    with torch.device("meta"):
        model = type(filled)(filled.config).eval()
    return EngineMemory.outlined(model, EngineConfig(**options), room)


def bytes_of(model: Any) -> int:
    return sum({each.data_ptr(): each.nbytes for each in chain(model.parameters(), model.buffers())}.values())


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3",
        "mixtral",
        "deepseek_v3",
        pytest.param("falcon_h1", marks=NEEDS_SLOTS),
        "t5",
        "bart",
        "gpt2",
    ],
)
def test_an_engine_takes_what_was_foretold(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention, windows, experts, latents, states, encoder-decoders: weights, blocks and bytes, by
    default and in a share of the memory.
    """
    model = model_of(family)
    weights = bytes_of(model)
    for options in ({}, {"memory_fraction": 0.5, "block_size": 4}):
        monkeypatch.setattr(pools, "free_bytes", lambda device: 2**26)
        with Engine(model, **options) as engine:
            stats = engine.stats()
            said = repr(engine)
        foretold = outline(family, Room("cpu", 2**26 + weights), **options)
        assert foretold.weights == weights
        assert {each.kind: each.blocks for each in foretold.pools} == {
            kind: blocks["total"] for kind, blocks in stats["blocks"].items()
        }
        assert sum(each.bytes for each in foretold.pools) == stats["memory"]["most_bytes"]
        assert said == f"Engine({type(model).__name__}, form={stats['form']!r}, requests=0): {foretold}"


def test_as_many_requests_fit_as_are_foretold() -> None:
    """Each as long as the model allows, beside what admission leaves free; one more waits."""
    options: dict[str, Any] = {"num_blocks": 70, "watermark": 0.1, "prefix_caching": False}
    foretold = outline("llama", Room("cpu", GIB), **options)
    assert (foretold.length, foretold.requests) == (256, 3)
    with Engine(build(BY_NAME["llama"]), **options) as engine:
        handles = [engine.submit([5 + i] * 255, max_new_tokens=1) for i in range(4)]
        engine.step()
        assert engine.stats()["waiting"] == 1
        assert all(handle.result().finish_reason == "length" for handle in handles)
        engine.check()


@NEEDS_SLOTS
def test_slots_for_states_are_foretold() -> None:
    """The bytes of one, those that fit in the memory, and the requests that they let run."""
    model = model_of("qwen3_5_text")
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"state_slots": 3, "state_snapshots": 0, "num_blocks": 40, "block_size": 4}
    with Engine(model, **options, max_batch_sequences=8) as engine:
        said = repr(engine)
        handles = [engine.submit([5 + i] * 3, max_new_tokens=4) for i in range(4)]
        engine.step()
        stats = engine.stats()
        assert (stats["running"], stats["waiting"]) == (3, 1)
        assert all(handle.result().finish_reason == "length" for handle in handles)
        engine.check()
    keys, states = stats["blocks"]["full"], stats["blocks"]["state"]
    foretold = outline("qwen3_5_text", Room("cpu", GIB), **options)
    slot = foretold.state_bytes
    assert slot * states["total"] == stats["memory"]["most_bytes"] - 40 * 4 * foretold.token_bytes
    assert f"{sized(foretold.token_bytes)} a token, {sized(slot)} of states a sequence\n" in said
    assert f"pools of {keys['total']} full blocks of 4 tokens, 3 state slots, " in said
    small = outline("qwen3_5_text", Room("cpu", foretold.weights + 100 * slot))
    assert {each.kind: each.blocks for each in small.pools}["state"] == int(
        0.6 * int(0.25 * 100 * slot) / slot
    )


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_an_adapter_takes_what_was_foretold(family: str) -> None:
    tuned = peft.get_peft_model(build(BY_NAME[family]), lora(r=16, target_modules="all-linear"), "one")
    with Engine(build(BY_NAME[family]), num_blocks=30) as engine:
        engine.add_adapter("one", tuned)
        assert engine.adapters()["one"].bytes == outline(family, Room("cpu", GIB)).adapter
    with Engine(tuned, num_blocks=30) as engine:  # of the model, not of its adapters
        assert f"{sized(outline(family, Room('cpu', GIB)).adapter)} each of rank 16" in repr(engine)


def test_a_card_by_its_size() -> None:
    """Its default share of what weights and captured steps leave, where that is less than the most requests
    need; a card without room for the weights holds nothing.
    """
    small = outline("llama", Room("cuda", 5 * 2**20))
    large = outline("llama", Room("cuda", GIB))
    assert large.pools[0].blocks == 256 * 17
    assert 0 < small.pools[0].bytes < 0.8 * (5 * 2**20 - small.weights)
    without = outline("llama", Room("cuda", 5 * 2**20), graphs=False)
    assert "captured steps" in large.facts()
    assert large.captures > 0 == without.captures
    assert "captured steps" not in without.facts()
    assert without.pools[0].blocks == int(0.8 * (5 * 2**20 - small.weights)) // 4096
    assert outline("llama", Room("cuda", 1000)).requests == 0


def test_an_engine_says_how_it_is() -> None:
    """In two lines, beside its memory."""
    engine = Engine(build(BY_NAME["llama"]), num_blocks=34)
    assert repr(engine).splitlines() == [
        "Engine(LlamaForCausalLM, form='flat', requests=0): weights 84.7 KiB in float32; keys and values 256 bytes "
        "a token",
        "pool of 34 blocks of 16 tokens, 136 KiB: 544 tokens, 2 requests of 256; adapters: 16 at once, 58 KiB each "
        "of rank 16",
    ]
    engine.submit([5, 6], max_new_tokens=2)
    engine.pause()
    assert "requests=1, paused)" in repr(engine)
    engine.sleep()
    assert "requests=1, asleep)" in repr(engine)
    engine.wake_up()
    assert "requests=1)" in repr(engine)
    engine.close()
    assert "requests=0, closed)" in repr(engine)


def test_sizes_in_words() -> None:
    counts = [0, 512, 1536, 1023 * 1024, 16 * GIB, 3 * 2**50]
    assert [sized(count) for count in counts] == [
        "0 bytes", "512 bytes", "1.5 KiB", "1,023 KiB", "16 GiB", "3,072 TiB",
    ]  # fmt: skip
