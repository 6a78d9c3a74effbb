"""Routing that is recorded: each token's experts are those of stock's forward of its whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captures import counts, policy, reasons
from engine_answers import PROMPTS, answers, small_engine
from engine_parts import preempt, running
from routed import mixture, routing_of
from tape import record

from hf_paged import OutOfBlocks
from hf_paged.engine import Engine
from hf_paged.model.rehearsal import RECORDERS

FAMILIES = ["mixtral", "qwen3-moe", "gpt-oss", "deepseek_v3", "qwen3_next", "lfm2_moe", "nemotron_h"]
"""Softmax before and behind the choice, windows, latents without experts in the first layer, states, experts
before the only attention.
"""

NO_END = 2**31 - 1
"""For assistants, which want an end in some releases."""


@pytest.fixture
def mixtral() -> Any:
    return mixture("mixtral")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured, on a stand-in for graphs."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)


def require_stocks(model: Any, *outputs: Any) -> None:
    """Every answer has the routing of stock's forward of its sequence."""
    for output in outputs:
        answers(output)
        for sequence in output.sequences:
            ids = torch.tensor([output.prompt_token_ids + sequence.token_ids])
            assert sequence.routing.dtype == torch.int16
            torch.testing.assert_close(sequence.routing, routing_of(model, ids)[0, :-1], rtol=0, atol=0)


def returned(model: Any, ids: torch.Tensor, config: Any = None, **options: Any) -> Any:
    """An answer of a paged generate() with its routing."""
    return model.generate(
        ids,
        cache_implementation="paged",
        cache_config={"return_routing": True, "block_size": 4, **(config or {})},
        return_dict_in_generate=True,
        **options,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_returns_routing(name: str) -> None:
    """Of chunks of prompts, hits, samples and requests among others that have none."""
    model = mixture(name)
    with small_engine(model) as engine:
        plain = engine.submit(PROMPTS[1], max_new_tokens=4)
        assert plain.result().sequences[0].routing is None
        handles = [
            engine.submit(p, max_new_tokens=9, return_routing=True, seed=3, do_sample=n > 1, num_return_sequences=n)
            for p in PROMPTS
            for n in (1, 2)
        ]  # fmt: skip
        others = [engine.submit(p, max_new_tokens=6) for p in PROMPTS[:3]]
        require_stocks(model, *(handle.result() for handle in handles))
        assert all(handle.result().sequences[0].routing is None for handle in others)
        engine.check()


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_returns_routing(name: str) -> None:
    """Of padded rows, equal prompts, samples that end early."""
    model = mixture(name)
    ids = torch.tensor([PROMPTS[2], PROMPTS[3][:9], PROMPTS[2]])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    torch.manual_seed(0)
    output = returned(
        model, ids, attention_mask=mask, max_new_tokens=12, do_sample=True, num_return_sequences=2,
        pad_token_id=0, eos_token_id=[*range(5, 20)],
    )  # fmt: skip
    sequences = output.sequences
    whole = torch.cat([mask.repeat_interleave(2, 0), torch.ones_like(sequences[:, 9:])], 1)
    routing = output.routing
    assert routing.shape[:2] == sequences.shape
    assert routing.dtype == torch.int16
    for row, own, ones in zip(routing, sequences, whole, strict=True):
        end = 9 + next((i + 1 for i, token in enumerate(own[9:]) if 5 <= token < 20), len(own) - 9)
        there = torch.arange(len(own)) < end - 1
        there &= ones.bool()
        assert (row[~there] == -1).all()
        torch.testing.assert_close(
            row[there], routing_of(model, own[None], ones[None])[0][there], rtol=0, atol=0
        )


@pytest.mark.parametrize("pad", [0, 7])
def test_rows_of_generate_end_with_their_last_token(mixtral: Any, pad: int) -> None:
    """Also where the pad token is one that ends rows."""
    ids = torch.tensor([PROMPTS[2], PROMPTS[3][:9]])
    free = mixtral.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    end = int(free[0, 11])  # the third new token of the first row
    pad = end if pad else pad
    output = returned(mixtral, ids, max_new_tokens=8, do_sample=False, eos_token_id=end, pad_token_id=pad)
    first = output.sequences[0, 9:].tolist().index(end)
    kept = (output.routing[0] >= 0).all(-1).all(-1).sum()
    assert kept == 9 + first


def test_without_an_end_no_token_is_padding(mixtral: Any) -> None:
    ids = torch.tensor([PROMPTS[2]])
    greedy: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    last = int(mixtral.generate(ids, pad_token_id=0, **greedy)[0, -1])
    output = returned(mixtral, ids, pad_token_id=last, **greedy)
    assert (output.routing[0, :-1] >= 0).all()
    assert (output.routing[0, -1] == -1).all()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("ahead", [False, True])
def test_routing_survives_a_preemption(mixtral: Any, mode: Any, ahead: bool) -> None:
    """Blocks that left before there was any routing come back as well."""
    with small_engine(mixtral, preemption=mode, run_ahead=ahead, prefix_caching=False) as engine:
        early = engine.submit(PROMPTS[0], max_new_tokens=20)
        for _ in range(4):
            engine.step()
        preempt(engine, running(engine)[0])
        handles = [engine.submit(p, max_new_tokens=20, return_routing=True) for p in PROMPTS[1:4]]
        for _ in range(8):
            engine.step()
        for group in running(engine)[1:]:
            preempt(engine, group)
        outputs = [handle.result() for handle in handles]
        assert early.result().finish_reason == "length"
        assert any(output.preemptions for output in outputs)
        require_stocks(mixtral, *outputs)
        engine.check()


def test_hits_have_their_routing(mixtral: Any) -> None:
    """To the token. What requests without routing have cached is not hit."""
    with small_engine(mixtral, num_blocks=100) as engine:
        engine.submit(PROMPTS[3], max_new_tokens=4).result()
        first = engine.submit(PROMPTS[3], max_new_tokens=6, return_routing=True).result()
        again = engine.submit(PROMPTS[3][:22] + [9, 9], max_new_tokens=6, return_routing=True).result()
        assert (first.cached_tokens, again.cached_tokens) == (0, 22)
        require_stocks(mixtral, first, again)


def test_prefixes_of_generate_have_their_routing(mixtral: Any) -> None:
    ids = torch.tensor([PROMPTS[3]])
    reuse = {"prefix_caching": True}
    mixtral.generate(ids, max_new_tokens=4, cache_implementation="paged", cache_config=reuse)
    for tail in ([], [9, 8]):
        own = torch.tensor([PROMPTS[3] + tail])
        output = returned(mixtral, own, reuse, max_new_tokens=6, do_sample=False, eos_token_id=None)
        expected = routing_of(mixtral, output.sequences)[:, :-1]
        torch.testing.assert_close(output.routing[:, :-1], expected, rtol=0, atol=0)


@pytest.mark.parametrize("ahead", [False, True])
def test_captured_steps_of_the_engine(mixtral: Any, ahead: bool, captured: None) -> None:
    """Those that were captured before the first request with routing are made anew."""
    mixtral.set_experts_implementation("batched_mm")
    with small_engine(mixtral, run_ahead=ahead, prefix_caching=False) as engine:
        for p in PROMPTS[:2]:
            engine.submit(p, max_new_tokens=12).result()
        before = counts(engine)["replayed"]
        assert before, reasons(engine)
        handles = [engine.submit(p, max_new_tokens=14, return_routing=True) for p in PROMPTS]
        require_stocks(mixtral, *(handle.result() for handle in handles))
        assert counts(engine)["replayed"] > before + 8, reasons(engine)


def test_captured_steps_of_generate(mixtral: Any, captured: None) -> None:
    """Of one call and of the next; calls without routing replay others."""
    mixtral.set_experts_implementation("batched_mm")
    ids = torch.tensor([PROMPTS[2], PROMPTS[3][:9], PROMPTS[1][:9]])
    greedy: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    mixtral.generate(ids, cache_implementation="paged", cache_config={"block_size": 4}, **greedy)
    for rows in (3, 3, 2):
        before = counts(mixtral)["replayed"]
        output = returned(mixtral, ids[:rows], **greedy)
        expected = routing_of(mixtral, output.sequences)[:, :-1]
        torch.testing.assert_close(output.routing[:, :-1], expected, rtol=0, atol=0)
        assert counts(mixtral)["replayed"] > before + 8, reasons(mixtral)


def test_assisted_rounds_keep_the_routing_of_what_is_accepted(mixtral: Any) -> None:
    ids = torch.tensor([PROMPTS[3]])
    for more in ({"assistant_model": mixture("llama")}, {"prompt_lookup_num_tokens": 3}):
        output = returned(mixtral, ids, max_new_tokens=12, do_sample=False, eos_token_id=NO_END, **more)
        expected = routing_of(mixtral, output.sequences)[:, :-1]
        torch.testing.assert_close(output.routing[:, :-1], expected, rtol=0, atol=0)


def test_checksums_cover_routing(mixtral: Any) -> None:
    with small_engine(mixtral, verify="bytes", num_blocks=24) as engine:
        handles = [engine.submit(p, max_new_tokens=9, return_routing=True) for p in PROMPTS]
        require_stocks(mixtral, *(handle.result() for handle in handles))


def test_models_and_requests_without_routing_are_refused_by_name(
    mixtral: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = mixture("llama")
    ids = torch.tensor([PROMPTS[2]])
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        returned(llama, ids, max_new_tokens=3)
    with pytest.raises(ValueError, match="return_dict_in_generate=True"):
        mixtral.generate(ids, cache_implementation="paged", cache_config={"return_routing": True})
    with pytest.raises(ValueError, match="num_beams=2"):
        returned(mixtral, ids, num_beams=2, max_new_tokens=3)
    with pytest.raises(ValueError, match="use_cache=False"):
        returned(mixtral, ids, use_cache=False, max_new_tokens=3)
    kept = returned(mixtral, ids, max_new_tokens=3)
    with pytest.raises(ValueError, match="handed in"):
        returned(mixtral, kept.sequences, past_key_values=kept.past_key_values, max_new_tokens=3)
    with Engine(llama, num_blocks=20) as engine, pytest.raises(ValueError, match="has no experts"):
        engine.submit(PROMPTS[0], return_routing=True)
    with small_engine(mixtral) as engine:
        with pytest.raises(ValueError, match="num_beams=3"):
            engine.submit(PROMPTS[0], num_beams=3, return_routing=True)
        with monkeypatch.context() as full:
            full.setattr("hf_paged.engine.worker.pools.free_bytes", lambda device: 100)
            with pytest.raises(OutOfBlocks, match=r"takes \d+ bytes beside \d+ of a pool on cpu, and 100"):
                engine.submit(PROMPTS[0], return_routing=True)
        with pytest.raises(TypeError, match="return_routing must be True or False"):
            engine.submit(PROMPTS[0], return_routing=1)  # type: ignore[arg-type]
        require_stocks(mixtral, engine.submit(PROMPTS[0], max_new_tokens=3, return_routing=True).result())
        cancelled = engine.submit(PROMPTS[0], max_new_tokens=9, return_routing=True)
        engine.step()
        cancelled.cancel()
        assert cancelled.result().sequences[0].routing is None
