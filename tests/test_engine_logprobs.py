"""The log-probabilities of sampled tokens: raw, and after penalties, temperature and cuts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engine_answers import PROMPTS
from engine_logprobs import one_forward
from engine_steps import watch_plans
from kernel_cases import load
from transformers import GenerationConfig, LogitsProcessor

from hf_paged.engine import Engine
from hf_paged.engine.sampling.random_numbers import row_states
from hf_paged.engine.sampling.scores import chosen_numbers_of
from hf_paged.engine.sampling.warp import draw

NEW = 8
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "plain": {"do_sample": True, "top_k": 0},
    "warped": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalty": {"do_sample": False, "repetition_penalty": 1.7},
    "penalty and draws": {"do_sample": True, "repetition_penalty": 1.7, "temperature": 1.4, "top_k": 0},
    "rules": {"do_sample": True, "top_k": 0, "suppress_tokens": [7, 8, 9], "no_repeat_ngram_size": 2},
}


class Halves(LogitsProcessor):
    """A user's processor: it runs for its own request on the host."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores / 2


def expected(model: Any, prompt: list[int], tokens: list[int], options: dict[str, Any]) -> torch.Tensor:
    """The logprob of each token after transformers' own processors."""
    own = {name: value for name, value in options.items() if name != "logits_processor"}
    config, _ = model._prepare_generation_config(GenerationConfig(**own))
    processors = [*model._get_logits_processor(config, input_ids_seq_length=len(prompt))]
    processors[:0] = options.get("logits_processor", [])
    found = []
    for i, scores in enumerate(one_forward(model, prompt, tokens).split(1)):
        ids = torch.tensor([prompt + tokens[:i]])
        for processor in processors:
            scores = processor(ids, scores)
        found.append(scores.log_softmax(-1)[0, tokens[i]])
    return torch.stack(found)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_processed_logprobs_are_those_of_what_tokens_were_drawn_from(model: Any, run_ahead: bool) -> None:
    """Many ways in one batch, beside requests without logprobs: each has its own."""
    ways = [*WAYS.values(), {"do_sample": True, "top_k": 0, "logits_processor": [Halves()]}]
    with Engine(model, block_size=4, num_blocks=120, run_ahead=run_ahead) as engine:
        handles = []
        for i, options in enumerate(ways):
            length = {"max_new_tokens": NEW, "min_new_tokens": 0, "eos_token_id": None}
            handles.append(engine.submit(PROMPTS[1], seed=i, logprobs=i % 3 or True, **length, **options))
            engine.submit(PROMPTS[2], seed=i, **length, **options)
        for handle, options in zip(handles, ways, strict=True):
            output = handle.result()
            tokens = output.sequences[0].token_ids
            notes = output.sequences[0].logprobs
            assert [note.token_id for note in notes] == tokens
            raw = one_forward(model, PROMPTS[1], tokens).log_softmax(-1)
            raw = raw.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor([note.logprob for note in notes]), raw, atol=1e-4, rtol=1e-4
            )
            after = torch.tensor([note.processed for note in notes])
            torch.testing.assert_close(
                after, expected(model, PROMPTS[1], tokens, options), atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("run_ahead", [False, True])
def test_they_decode_with_all_others(model: Any, run_ahead: bool) -> None:
    """C13: rows with logprobs are part of the decode batch; each token comes with its own note, also to a
    reader meanwhile, whoever ends and joins beside it.
    """
    decodes: list[int] = []
    ways: list[dict[str, Any]] = [
        {"logprobs": True, "num_return_sequences": 2},
        {"logprobs": 3},
        {},
        {"logprobs": True},
    ]
    with Engine(model, block_size=4, num_blocks=120, run_ahead=run_ahead) as engine:
        watch_plans(engine, lambda plan: decodes.append(plan.batch.decodes))
        handles = []
        for i, way in enumerate(ways):
            new = {"max_new_tokens": 5 + 4 * i, "min_new_tokens": 0, "eos_token_id": None}
            handles.append(engine.submit(PROMPTS[i], seed=i, do_sample=True, top_k=0, **new, **way))
        read = [(part.token_ids, part.logprobs) for part in handles[1]]
        outputs = [handle.result() for handle in handles]
        assert max(decodes) == 5
        engine.check()
    assert [[note.token_id for note in notes] for _, notes in read] == [tokens for tokens, _ in read]
    assert [token for tokens, _ in read for token in tokens] == outputs[1].sequences[0].token_ids
    for prompt, output, way in zip(PROMPTS, outputs, ways, strict=False):
        for sequence in output.sequences:
            if "logprobs" not in way:
                assert sequence.logprobs is None
                continue
            assert [note.token_id for note in sequence.logprobs] == sequence.token_ids
            assert {len(note.top_logprobs) for note in sequence.logprobs} == {int(way["logprobs"]) // 3 * 3}
            raw = one_forward(model, prompt, sequence.token_ids).log_softmax(-1)
            raw = raw.gather(1, torch.tensor(sequence.token_ids)[:, None])[:, 0]
            found = torch.tensor([note.logprob for note in sequence.logprobs])
            torch.testing.assert_close(found, raw, atol=1e-4, rtol=1e-4)


def test_what_cuts_keep(model: Any) -> None:
    """The share of the probability that was left to choose from leads back to the logprob without cuts."""
    ways: list[dict[str, Any]] = [
        {"do_sample": True, "temperature": 0.8, "top_k": 5},
        {"do_sample": True, "top_k": 0, "top_p": 0.7},
        {"do_sample": True, "temperature": 1.4, "top_k": 20, "min_p": 0.1},
        {"do_sample": True, "temperature": 0.7, "top_k": 0},
        {"do_sample": False},
        {"do_sample": True, "top_k": 5, "logits_processor": [Halves()]},
    ]
    with Engine(model, block_size=4, num_blocks=120) as engine:
        handles = [
            engine.submit(PROMPTS[1], seed=i, logprobs=True, max_new_tokens=NEW, eos_token_id=None, **way)
            for i, way in enumerate(ways)
        ]
        outputs = [handle.result().sequences[0] for handle in handles]
    for output, way in zip(outputs[:4], ways, strict=False):
        logits = one_forward(model, PROMPTS[1], output.token_ids) / way.get("temperature", 1.0)
        uncut = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        found = torch.tensor([note.processed + math.log(note.kept) for note in output.logprobs])
        torch.testing.assert_close(found, uncut, atol=1e-4, rtol=1e-4)
    assert all(0 < note.kept < 1 for output in outputs[:3] for note in output.logprobs)
    assert all(note.kept == 1 for output in outputs[3:5] for note in output.logprobs)
    assert all(note.kept is None for note in outputs[5].logprobs)


@pytest.mark.parametrize("top_logprobs", [0, 3])
def test_kernels_find_what_torch_finds(monkeypatch: pytest.MonkeyPatch, top_logprobs: int) -> None:
    """C27, C35: draws and numbers of tokens are the same where Triton computes them on a CUDA device."""
    chance = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, 5000, generator=chance)
    cut = logits.masked_fill(torch.rand(6, 5000, generator=chance) < 0.7, -torch.inf)
    keys = [list(range(6)), [0] * 6, list(range(9, 15))]

    def found() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = draw(cut, row_states(*keys[:2]), keys[2])
        return tokens, chosen_numbers_of(logits, tokens, top_logprobs, cut, logits)

    tokens, numbers = found()
    package = load()
    for module in ("warp", "scores"):
        monkeypatch.setattr(f"hf_paged.engine.sampling.{module}.triton_package", lambda *_: package)
    others, own = found()
    assert others.tolist() == tokens.tolist()
    assert own.shape == (6, 4 + 2 * top_logprobs)
    torch.testing.assert_close(own, numbers, rtol=1e-6, atol=2e-6)
