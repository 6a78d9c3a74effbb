"""verify="bytes" in an engine: each event finds a byte that has changed, and ends the requests that hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import every_other
from engine_answers import KINDS, PROMPTS, _model, answers, right
from engine_parts import block_pools, layer_groups, preempt, running, swapped
from latent_models import deepseek

from hf_paged.blocks.pool import CACHED
from hf_paged.engine import Engine, EngineConfig
from hf_paged.engine.handle import Handle
from hf_paged.kv.checksums import CorruptedBlock, flip_a_byte

NEW = 9
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
VERIFIED: dict[str, Any] = {"block_size": 4, "num_blocks": 60, "verify": "bytes"}


def flip(engine: Engine, block: int, layer: int = 0) -> None:
    (group,) = layer_groups(engine)
    flip_a_byte(*group.stores.values(), block, layer=layer)


def cached(engine: Engine) -> list[int]:
    """The cached blocks, in the order in which a prompt has filled them."""
    (pool,) = block_pools(engine)
    return [block for block, state in enumerate(pool.states()) if state == CACHED]


def ends(handle: Handle, event: str) -> None:
    """The request ends by name, with the block and the event."""
    output = handle.result()
    assert output.finish_reason == "error"
    assert isinstance(output.error, CorruptedBlock)
    assert f"was {event}" in str(output.error), output.error
    assert f"the answer of request {handle.number}" in str(output.error)


def is_sound(engine: Engine, prompt: int, kind: int = 0) -> None:
    """A request is answered as if nothing had happened."""
    handle = engine.submit(PROMPTS[prompt], max_new_tokens=NEW, seed=prompt, **KINDS[kind])
    assert answers(handle.result()) == right("llama", prompt, kind, NEW)


@pytest.mark.parametrize(("kind", "run_ahead"), every_other(range(len(KINDS)), [False, True]))
def test_a_prefix_hit(kind: int, run_ahead: bool) -> None:
    """C45: the request gets no token that comes of it, others run on, and nobody finds the block again."""
    with Engine(_model("llama"), run_ahead=run_ahead, **VERIFIED) as engine:
        is_sound(engine, 3)
        other = engine.submit(PROMPTS[1], **GREEDY)
        engine.step()
        flip(engine, cached(engine)[2], layer=1)
        bad = engine.submit(PROMPTS[3], max_new_tokens=NEW, seed=3, **KINDS[kind])
        ends(bad, "shared")
        assert "first in layer 1" in str(bad.result().error)
        assert [len(each.token_ids) for each in bad.result().sequences] == [0] * len(bad.result().sequences)
        assert answers(other.result()) == right("llama", 1, 0, NEW)
        is_sound(engine, 3, kind)
        engine.check()
        assert engine.stats()["verify"]["mismatched"] >= 1  # samples share it again before the host knows


def test_a_request_that_runs_holds_the_block_too() -> None:
    """Who shares it finds it, and all that hold it end."""
    with Engine(_model("llama"), **VERIFIED) as engine:
        first = engine.submit(PROMPTS[3], **GREEDY)
        while engine.stats()["tokens"] < 33:
            engine.step()
        flip(engine, running(engine)[0].leader.tables[0].blocks[0])
        second = engine.submit(PROMPTS[3], **GREEDY)
        ends(second, "shared")
        ends(first, "shared")
        is_sound(engine, 3)
        engine.check()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_fork(prefix_caching: bool) -> None:
    """A block of the prompt, which samples come to share, with names and without."""
    with Engine(_model("llama"), prefix_caching=prefix_caching, max_batch_tokens=20, **VERIFIED) as engine:
        handle = engine.submit(PROMPTS[3], num_return_sequences=2, do_sample=True, max_new_tokens=NEW)
        engine.step()
        flip(engine, running(engine)[0].leader.tables[0].blocks[1])
        ends(handle, "shared")
        engine.check()


def test_a_copy() -> None:
    """A prompt that continues from the middle of a block gets a copy of it."""
    with Engine(_model("llama"), **VERIFIED) as engine:
        is_sound(engine, 3)
        flip(engine, cached(engine)[3])
        handle = engine.submit([*PROMPTS[3][:14], 5], **GREEDY)
        ends(handle, "copied")
        engine.check()


def test_a_copy_that_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy is compared with its source, also of a block that is not full."""
    with Engine(_model("llama"), **VERIFIED) as engine:
        is_sound(engine, 1)
        (group,) = layer_groups(engine)
        (store,) = group.stores.values()
        right_copy = store.copy

        def wrong(copies: Any) -> None:
            right_copy(copies)
            flip_a_byte(store, copies[0].target)

        monkeypatch.setattr(store, "copy", wrong)
        handle = engine.submit(PROMPTS[3], num_return_sequences=2, do_sample=True, max_new_tokens=NEW)
        ends(handle, "copied")
        engine.check()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_swap_out(run_ahead: bool) -> None:
    with Engine(
        _model("llama"), run_ahead=run_ahead, preemption="swap", host_blocks=60, **VERIFIED
    ) as engine:
        handle = engine.submit(PROMPTS[3], **GREEDY)
        for _ in range(4):
            engine.step()
        flip(engine, running(engine)[0].leader.tables[0].blocks[1])
        preempt(engine, running(engine)[0])
        ends(handle, "swapped out")
        is_sound(engine, 3)
        engine.check()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_swap_in(prefix_caching: bool) -> None:
    """Memory of the host that has changed meanwhile, also of a block that is not full."""
    with Engine(
        _model("llama"),
        prefix_caching=prefix_caching,
        preemption="swap",
        watermark=0.0,
        **{**VERIFIED, "num_blocks": 22},
    ) as engine:
        handles = [engine.submit(PROMPTS[p], do_sample=False, max_new_tokens=60) for p in (2, 5)]
        parked = swapped(engine).leader.parked[0].blocks
        host = layer_groups(engine)[0].host
        assert host is not None
        host.memory_of(parked[-1])[0].view(torch.uint8)[3] ^= 1
        ends(handles[1], "swapped in")
        assert handles[0].result().error is None
        engine.check()


def test_an_eviction(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody holds the block any more: the log and the counts say it, and no request ends."""
    with Engine(_model("llama"), **{**VERIFIED, "num_blocks": 20}) as engine:
        is_sound(engine, 3)
        flip(engine, cached(engine)[-2])
        for prompt in (1, 5, 2):
            is_sound(engine, prompt)
        engine.check()
        assert engine.stats()["verify"]["mismatched"] == 1
    assert "found when the block was evicted" in caplog.text


def test_windows_and_latents() -> None:
    """Layers of several pools, and one vector a token: nothing is found where nothing has changed, and a byte
    of any layer is.
    """
    for model in (_model("qwen2-window"), deepseek()):
        with Engine(model, **VERIFIED) as engine:
            expected = engine.generate(PROMPTS[:4], **GREEDY)
            again = engine.generate(PROMPTS[:4], **GREEDY)
            assert [answers(each) for each in again] == [answers(each) for each in expected]
            assert engine.stats()["verify"]["checked"] > 0
            assert engine.stats()["verify"]["mismatched"] == 0
            group = layer_groups(engine)[-1]
            for block in range(group.pool.top):
                flip_a_byte(*group.stores.values(), block)
            ends(engine.submit(PROMPTS[3], **GREEDY), "shared")
            engine.check()


def test_nothing_is_verified_without_the_option() -> None:
    with Engine(_model("llama"), block_size=4, num_blocks=60) as engine:
        is_sound(engine, 3)
        is_sound(engine, 3)
        assert engine.stats()["verify"] == {"checked": 0, "mismatched": 0}


def test_its_values() -> None:
    with pytest.raises(ValueError, match=r"verify='all' is not one of \(None, 'tokens', 'bytes'\)"):
        EngineConfig(verify="all")  # type: ignore[arg-type]
