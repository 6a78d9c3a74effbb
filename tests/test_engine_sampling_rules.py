"""Processors that run for all rows at once: the tokens of the processors called request by request, whoever
is beside them.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, VOCABULARY, build
from tape import record
from transformers import LogitsProcessor
from transformers.generation import logits_process as stock

from hf_paged.engine import Engine
from hf_paged.engine.sampling.rules import ProcessorRule, processed, processor_plan_of
from hf_paged.model.rehearsal import RECORDERS

END = 40
"""The end of sequence of these tests: an id that the model chooses now and then."""
GREEDY: list[dict[str, Any]] = [
    {"min_new_tokens": 9},
    {"min_length": 20},
    {"suppress_tokens": [3, 17, 40, 61]},
    {"begin_suppress_tokens": list(range(20, 70))},
    {"forced_eos_token_id": END},
    {"exponential_decay_length_penalty": (3, 1.4)},
    {"sequence_bias": [[[5], 2.5], [[40], 6.0], [[9], -3.0]]},
    {"bad_words_ids": [[5], [11], [40]]},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"bad_words_ids": [[5], [11, 7], [9, 30, 52], [40]]},
    {"sequence_bias": [[[5], 2.5], [[5, 40], 6.0], [[9, 11], -3.0], [[7, 30, 11, 8], 4.0]]},
    {"remove_invalid_values": True},
    {"renormalize_logits": True},
    {"repetition_penalty": 1.6},
]
SAMPLED: list[dict[str, Any]] = [
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.03},
    {"top_h": 0.5},
    {"min_p": 0.1},
    {"top_p": 0.8},
    {"top_k": 12},
    {"temperature": 1.4},
]


class Nothing(LogitsProcessor):
    """A processor of a user: with it a request runs its processors for itself."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def told(output: Any) -> list[list[int]] | None:
    """The answers; None where transformers' processors made NaN of a ruled-out end of sequence, as its 5.17
    does.
    """
    return None if "NaN" in str(output.error) else answers(output)


def requests(count: int, seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts with options of every kind, several of them together, many of them twice."""
    chance = random.Random(seed)
    kinds: list[dict[str, Any]] = []
    for _ in range(count):
        options: dict[str, Any] = {
            "max_new_tokens": 12,
            "eos_token_id": END,
            "do_sample": chance.random() < 0.5,
        }
        for own in chance.sample(GREEDY, chance.choice([1, 1, 2, 4])):
            options |= own
        if options["do_sample"]:
            options |= {"seed": chance.randrange(5), "num_return_sequences": chance.choice([1, 1, 2])}
            for own in chance.sample(SAMPLED, chance.choice([1, 2, 4])):
                options |= own
        kinds.append(options)
    return [(chance.choice(PROMPTS), {**chance.choice(kinds)}) for _ in range(count)]


@pytest.mark.parametrize(("ahead", "graphs"), [(False, False), (True, True)])
def test_each_row_has_its_own_rules(ahead: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C35: in a crowd, in small pools with preemptions, at once and ahead, from graphs and not."""
    if graphs:
        monkeypatch.setitem(RECORDERS, "cpu", record)
    model = build(BY_NAME["llama"])
    params = requests(24, seed=2 * ahead + graphs)
    with Engine(model, num_blocks=200, run_ahead=False, prefix_caching=False) as engine:
        handles = [
            engine.submit(prompt, logits_processor=[Nothing()], **options) for prompt, options in params
        ]
        expected = [told(handle.result()) for handle in handles]
        assert engine.stats()["slow_processors"] == {"Nothing": len(params)}
    for (prompt, options), found in zip(params[:8], expected, strict=False):
        if not options["do_sample"] and found is not None:
            assert found == alone(model, prompt, **options)
    with Engine(model, block_size=4, num_blocks=24, max_batch_sequences=8, run_ahead=ahead) as engine:
        handles = [engine.submit(prompt, **options) for prompt, options in params]
        assert [told(handle.result()) for handle in handles] == expected
        assert not engine.stats()["slow_processors"]
        assert engine.stats()["preemptions"]
        engine.check()


def test_rows_with_equal_rules_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests, one call of each processor for a step in which their rows are alike."""
    calls: list[int] = []
    inner = stock.MinNewTokensLengthLogitsProcessor.__call__

    def counted(self: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(len(scores))
        return inner(self, ids, scores)

    monkeypatch.setattr(stock.MinNewTokensLengthLogitsProcessor, "__call__", counted)
    with Engine(build(BY_NAME["llama"]), num_blocks=200) as engine:
        engine.generate(
            PROMPTS[:3] * 2, min_new_tokens=4, max_new_tokens=8, do_sample=False, eos_token_id=END
        )
        assert sum(calls) == 6 * 4  # nothing is called where the processor would do nothing
        assert max(calls) == 6


@pytest.mark.parametrize("kind", [*GREEDY[:-1], *SAMPLED], ids=json.dumps)
def test_scores_are_those_of_the_processors(kind: dict[str, Any]) -> None:
    """Bit for bit, whatever lengths the rows have."""
    model = build(BY_NAME["llama"])
    config, _ = model._prepare_generation_config(None, eos_token_id=END, do_sample=kind in SAMPLED, **kind)
    model._prepare_special_tokens(config, True, device="cpu")
    lengths = [14, 15, 20, 14, 1]
    starts = [14, 12, 13, 11, 1]
    config.max_length = 15
    made = [
        model._get_logits_processor(config, start, torch.zeros(1, start), None, [], "cpu", {})
        for start in starts
    ]
    torch.manual_seed(1)
    scores = torch.randn(len(lengths), VOCABULARY) * 3
    scores[2, 4:9] = -torch.inf
    plans = [processor_plan_of(own, sampled=False)[0] for own in made]
    rows = [torch.randint(5, 12, (length,)) for length in lengths]
    rows[1][-4:] = torch.tensor([7, 30, 11, 7])
    rows[3][-2:] = torch.tensor([9, 30])

    def read(places: list[int], width: int, pad: int) -> torch.Tensor:
        ends = [rows[place][-width:] for place in places]
        return torch.stack([torch.nn.functional.pad(end, (width - len(end), 0), value=pad) for end in ends])

    found = processed(scores, [plan.between for plan in plans if plan], lengths, pytest.fail, read)
    for row, own in enumerate(made):
        assert torch.equal(found[row : row + 1], own(rows[row][None], scores[row : row + 1]))


def test_a_row_for_which_a_processor_raises_is_alone() -> None:
    """Its neighbours in the same call are processed."""

    class Picky:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if (scores[:, 0] > 0).any():
                raise IndexError("positive")
            return scores - 1

    rule = ProcessorRule(Picky(), "picky", lambda length: True)
    scores = torch.tensor([[-1.0, 2.0], [1.0, 2.0], [-3.0, 5.0], [7.0, 7.0]])
    failed: list[tuple[int, str]] = []
    found = processed(
        scores,
        [(rule,), (rule,), (rule,), ()],
        [3, 3, 3, 3],
        lambda row, error: failed.append((row, str(error))),
    )
    assert failed == [(1, "positive")]
    assert found[1].isnan().all()
    assert found[[0, 2, 3]].tolist() == [[-2.0, 1.0], [-4.0, 4.0], [7.0, 7.0]]


def test_a_processor_that_raises_ends_its_own_requests() -> None:
    """An id beyond the vocabulary: transformers' own error, and the neighbours go on."""
    model = build(BY_NAME["llama"])
    with Engine(model, num_blocks=200) as engine:
        options = {"max_new_tokens": 6, "do_sample": False}
        wrong = engine.submit(PROMPTS[0], sequence_bias=[[[VOCABULARY + 3], 1.0]], **options)
        right = engine.submit(PROMPTS[1], sequence_bias=[[[7], 1.0]], **options)
        with pytest.raises(ValueError, match="vocabulary size"):
            answers(wrong.result())
        assert answers(right.result()) == alone(model, PROMPTS[1], sequence_bias=[[[7], 1.0]], **options)
        engine.check()


@pytest.mark.parametrize("cut", [{"eta_cutoff": 0.1}, {"top_h": 0.5}, {"typical_p": 0.5}])
def test_nothing_left_to_draw_is_the_requests_own_end(cut: dict[str, Any]) -> None:
    model = build(BY_NAME["llama"])
    with Engine(model, num_blocks=200) as engine:
        options = {"max_new_tokens": 6, "do_sample": True, "seed": 1, **cut}
        expected = answers(engine.submit(PROMPTS[1], **options).result())
        wrong = engine.submit(PROMPTS[0], suppress_tokens=list(range(VOCABULARY)), **options)
        right = engine.submit(PROMPTS[1], **options)
        with pytest.raises(RuntimeError, match="no token to draw"):
            answers(wrong.result())
        assert answers(right.result()) == expected


def test_stats_name_the_processors_that_run_for_one_request() -> None:
    with Engine(build(BY_NAME["llama"]), num_blocks=200) as engine:
        options = {"max_new_tokens": 2, "do_sample": False}
        engine.generate(PROMPTS[:2], encoder_repetition_penalty=1.3, min_new_tokens=2, **options)
        engine.generate(PROMPTS[:1], logits_processor=[Nothing()], **options)
        engine.generate(PROMPTS[:1], num_beams=2, suppress_tokens=[3], **options)
        engine.generate(PROMPTS[:1], suppress_tokens=[3], **options)
        slow = {
            "EncoderRepetitionPenaltyLogitsProcessor": 2,
            "Nothing": 1,
            "SuppressTokensLogitsProcessor": 1,
        }
        assert engine.stats()["slow_processors"] == slow
