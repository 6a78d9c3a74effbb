"""The engine on the device there is, in float32 and bfloat16: its logprobs are those of one forward over what
it said.

Tokens may differ from generate()'s where rounding cannot tell two of them apart; what the model thought of
the tokens may not.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from captures import reasons
from cases import once_each
from engine_answers import PROMPTS
from engine_logprobs import DEVICE, assert_own_logprobs, bound_of, one_forward
from families import BY_NAME, build
from pictures import with_pictures
from tiny import build as build_shown
from tiny import config_class

from hf_paged.engine import Engine

OPTIONS = {"block_size": 4, "num_blocks": 60, "max_batch_tokens": 17, "max_batch_sequences": 8}
TIGHT = {
    "block_size": 4,
    "num_blocks": 26,
    "max_batch_tokens": 32,
    "max_batch_sequences": 16,
    "prefix_caching": False,
    "preemption": "swap",
    "host_blocks": 200,
}
WAYS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "num_return_sequences": 2, "seed": 1},
    {"num_beams": 3},
]


DTYPES = [torch.float32, torch.bfloat16]
combined = once_each if DEVICE == "cpu" else itertools.product
"""On a CPU an operation's dtype is torch's own matter."""


@pytest.mark.parametrize("kernels", ["auto", "torch"] if DEVICE == "cuda" else ["auto"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    combined(["llama", "qwen2-window", "gemma2", "mistral-window", "gpt2", "bloom"], DTYPES),
    ids=str,
)
def test_logprobs_are_those_of_one_forward(name: str, kernels: str, dtype: torch.dtype) -> None:
    """C23, C35: chunks, decoding, forks and recomputation, through the kernels where there are any."""
    model = build(BY_NAME[name]).to(DEVICE, dtype)
    with Engine(model, kernels=kernels, **OPTIONS) as engine:
        handles = [
            engine.submit(prompt, max_new_tokens=8, logprobs=1, **way)
            for way in WAYS
            for prompt in PROMPTS[:4]
        ]
        for _ in range(6):
            engine.step()
        engine.pause()
        engine.resume()
        outputs = [handle.result() for handle in handles]
        engine.check()
    for output in outputs:
        assert_own_logprobs(model, output)


@pytest.mark.parametrize(("name", "dtype"), combined(["llama", "qwen2-window"], DTYPES), ids=str)
def test_swapped_keys_and_values_are_their_own(name: str, dtype: torch.dtype) -> None:
    """C30: out of the stores and back on a stream of their own, while everybody else goes on."""
    model = build(BY_NAME[name]).to(DEVICE, dtype)
    with Engine(model, **TIGHT) as engine:
        handles = [
            engine.submit(prompt, max_new_tokens=20, logprobs=1, **way)
            for way in WAYS
            for prompt in PROMPTS[:4]
        ]
        outputs = [handle.result() for handle in handles]
        assert_swapped(engine)
    for output in outputs:
        assert_own_logprobs(model, output)


@pytest.mark.parametrize(("name", "dtype"), combined(["qwen2-window", "llama"], DTYPES), ids=str)
def test_swapped_while_the_next_step_is_planned(name: str, dtype: torch.dtype) -> None:
    """Run ahead, whatever the device: greedy tokens are the model's likeliest, up to rounding."""
    model = build(BY_NAME[name]).to(DEVICE, dtype)
    with Engine(model, run_ahead=True, **TIGHT) as engine:
        outputs = engine.generate(PROMPTS * 2, max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert_swapped(engine)
    for output in outputs:
        (sequence,) = output.sequences
        logits = one_forward(model, output.prompt_token_ids, sequence.token_ids)
        chosen = logits.gather(1, torch.tensor(sequence.token_ids, device=DEVICE)[:, None])[:, 0]
        assert float((logits.amax(-1) - chosen).max()) <= bound_of(logits, dtype)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl"])
def test_pictures(name: str) -> None:
    """C23: shown twice in chunks, and then from what is kept of them, tokens on several axes and features of
    later layers among them; in float32 generate()'s tokens. The steps behind them come from graphs where
    there are any."""
    model = build_shown("image", config_class("image", name))
    given = with_pictures(model, rows=1)
    assert given is not None
    model.to(DEVICE)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    shown = [
        given,
        {key: value * 0.5 + 0.1 if value.is_floating_point() else value for key, value in given.items()},
    ]
    here = [{key: value.to(DEVICE) for key, value in each.items()} for each in shown]
    expected = [model.generate(**each, **options)[0, each["input_ids"].shape[1] :].tolist() for each in here]
    with Engine(model, **OPTIONS) as engine:
        for _ in range(3):
            handles = [engine.submit(**each, **options) for each in shown]
            assert [handle.result().sequences[0].token_ids for handle in handles] == expected
        engine.check()
        assert (engine.stats()["graphs"].get("replayed", 0) > 10) == (DEVICE == "cuda"), reasons(engine)


def assert_swapped(engine: Engine) -> None:
    engine.check()
    stats = engine.stats()
    assert stats["swapped_in"] == stats["swapped_out"] > 2
    assert stats["recomputed"] == 0
    assert all(kind["held"] == 0 for kind in [*stats["blocks"].values(), *stats["host"].values()])


@pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU there is no device to wait for")
def test_a_request_waits_for_no_step() -> None:
    """Requests come while steps run: reading them must not make the caller wait for the device."""
    model = build(BY_NAME["llama"]).to(DEVICE)
    with Engine(model, **OPTIONS) as engine:
        way = {"max_new_tokens": 6, "do_sample": True, "top_k": 5, "logprobs": True}
        first = engine.submit(PROMPTS[0], **way)
        engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            second = engine.submit(PROMPTS[1], **way)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(output.error is None for output in (first.result(), second.result()))
