"""Sequences with recurrent states in an engine: what each answers alone, under pressure, captured, forked (C7)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captures import counts, policy
from poison import poison_free_slots
from tape import record
from tiny import build, config_class

from hf_paged import Engine
from hf_paged.model.rehearsal import RECORDERS

FAMILIES = ["falcon_h1", "kimi_linear", "lfm2", "nemotron_h", "qwen3_5_text", "zamba2", "zaya"]
LENGTHS = (3, 11, 1, 7, 20, 5)
NEW = 14


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_free_slots(monkeypatch)


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(0)
    return [torch.randint(5, 60, (length,), generator=chance).tolist() for length in LENGTHS]


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """The tokens that stock's generate() adds to a prompt by itself."""
    given = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(torch.tensor([prompt]), **given)[0, len(prompt) :].tolist()


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    made = build("causal", config_class("causal", request.param))
    made.generation_config.eos_token_id = None
    return made


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize("graphs", [False, True], ids=["one by one", "captured"])
def test_sequences_answer_as_alone(model: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces beside decoding ones, and a search by beams, whose states are forked."""
    if graphs:
        monkeypatch.setitem(RECORDERS, "cpu", record)
        policy(monkeypatch, after=1, agree=1)
    with Engine(model, max_batch_tokens=8, max_batch_sequences=4) as engine:
        handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts()]
        beams = engine.submit(prompts()[1], max_new_tokens=6, num_beams=3)
        for prompt, handle in zip(prompts(), handles, strict=True):
            assert handle.result().sequences[0].token_ids == alone(model, prompt)
        found = beams.result().sequences[0].token_ids
        assert found == alone(model, prompts()[1], max_new_tokens=6, num_beams=3)
        assert bool(counts(engine)["replayed"]) is graphs
        engine.check()


@pytest.mark.parametrize("model", ["qwen3_5_text"], indirect=True)
def test_sequences_beyond_the_slots_are_preempted(model: Any) -> None:
    """Samples of a prompt take slots of their own; what does not fit is computed again later."""
    with Engine(model, state_slots=4, num_blocks=18, block_size=4, max_batch_sequences=4) as engine:
        handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts()]
        samples = engine.submit(
            prompts()[3], max_new_tokens=NEW, num_return_sequences=3, do_sample=True, top_k=1
        )
        for prompt, handle in zip(prompts(), handles, strict=True):
            assert handle.result().sequences[0].token_ids == alone(model, prompt)
        assert all(each.token_ids == alone(model, prompts()[3]) for each in samples.result().sequences)
        assert engine.stats()["preemptions"]
        engine.check()


@pytest.mark.parametrize("model", ["qwen3_5_text"], indirect=True)
def test_no_prefixes_are_kept_and_the_stats_say_why(model: Any) -> None:
    with Engine(model, max_batch_sequences=2) as engine:
        for _ in range(2):
            assert engine.submit(prompts()[4] * 2, max_new_tokens=2).result().cached_tokens == 0
        assert "recurrent states" in engine.stats()["off"]["prefix_caching"]
        engine.check()
