"""OpenAI's penalties of many requests at once: the tokens of generate() with a processor that counts, while
requests join, end, are preempted and broken into.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cases import examples
from engine_answers import PROMPTS, alone, checked_answers, each_alone, small_engine
from engine_steps import broken_into, job_of, own_steps
from families import BY_NAME, VOCABULARY, build
from hypothesis import given, settings
from hypothesis import strategies as st
from tape import record
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

from hf_paged.engine import Engine
from hf_paged.engine.sampling.penalties import AnswerPenalties, with_counts_off, with_penalties
from hf_paged.engine.worker.check_policy import CheckPolicy
from hf_paged.model.rehearsal import RECORDERS

NEW = 14


class Counting(LogitsProcessor):
    """OpenAI's formula, one token after another."""

    def __init__(self, prompt: int, presence: float = 0.0, frequency: float = 0.0) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found = scores.clone()
        for row, ids in enumerate(input_ids[:, self.prompt :].tolist()):
            for token in set(ids):
                found[row, token] -= ids.count(token) * self.frequency + self.presence
        return found


def counting(model: Any, prompt: list[int], options: dict[str, Any]) -> list[list[int]]:
    """The tokens of generate(), where a processor of the test's own stands for the penalties."""
    others = dict(options)
    own = Counting(len(prompt), others.pop("presence_penalty", 0.0), others.pop("frequency_penalty", 0.0))
    return alone(model, prompt, logits_processor=LogitsProcessorList([own]), **others)


NUMBERS = st.sampled_from([0.0, 0.5, -0.75, 2.0])


@settings(max_examples=examples(50))
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(0, 6), max_size=9), NUMBERS, NUMBERS), min_size=1, max_size=5
    )
)
def test_penalties_count_the_tokens_of_answers(rows: list[tuple[list[int], float, float]]) -> None:
    """Answers of all lengths side by side, each row with its own numbers: the formula of OpenAI's API."""
    scores = torch.arange(8.0).expand(len(rows), 8).clone()
    scores[:, 7] = -torch.inf
    right = torch.cat(
        [Counting(0, *numbers)(torch.tensor([ids], dtype=torch.long), scores[:1]) for ids, *numbers in rows]
    )
    longest = max(len(ids) for ids, *_ in rows)
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids, *_ in rows], dtype=torch.long)
    there = torch.tensor([[i < len(ids) for i in range(longest)] for ids, *_ in rows], dtype=torch.bool)
    numbers = torch.tensor([[presence, frequency] for _, presence, frequency in rows]).T[:, :, None]
    found = with_counts_off(scores.clone(), padded.view(len(rows), -1), there.view(len(rows), -1), *numbers)
    assert torch.equal(found, right)


def test_prompts_cost_nothing_and_scores_stay() -> None:
    scores = torch.zeros(1, 6)
    found = AnswerPenalties(2, 0.5, 1.0)(torch.tensor([[5, 5, 1, 2, 2]]), scores)
    assert found.tolist() == [[0, -1.5, -2.5, 0, 0, 0]]
    assert scores.eq(0).all()


def test_penalties_run_behind_repetition_penalties() -> None:
    """And before all processors of which the order says nothing; without any the list stays."""
    bias = stock.SequenceBiasLogitsProcessor({(3,): 1.0})
    repetition = stock.RepetitionPenaltyLogitsProcessor(1.2)
    least = stock.SuppressTokensLogitsProcessor([3])
    given = LogitsProcessorList([bias, repetition, least])
    assert with_penalties(given, 3, 0.0, 0.0) is given
    kinds = [type(each) for each in with_penalties(given, 3, 0.0, 1.0)]
    assert kinds == [type(bias), type(repetition), AnswerPenalties, type(least)]
    assert type(with_penalties(LogitsProcessorList([least]), 3, 1.0, 0.0)[0]) is AnswerPenalties


KINDS: list[dict[str, Any]] = [
    {"do_sample": False, "presence_penalty": 3.0},
    {"do_sample": False},
    {"do_sample": False, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"do_sample": True, "seed": 3, "num_return_sequences": 2, "frequency_penalty": -2.0, "top_k": 30},
    {"do_sample": False, "repetition_penalty": 1.2, "logprobs": 2},
    {"do_sample": False, "presence_penalty": -1.0, "frequency_penalty": 2.0, "logprobs": 2},
    {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "presence_penalty": 2.0},
]

PARAMS = [(prompt, {**kind, "max_new_tokens": NEW}) for prompt in PROMPTS[:3] for kind in KINDS]


@functools.cache
def right() -> list[list[list[int]]]:
    """The answers to each of them alone: those without draws are those of a processor that counts."""
    return each_alone(PARAMS, counting)


@pytest.mark.parametrize(("ahead", "graphs"), [(False, False), (True, True)])
def test_answers_are_those_of_a_processor_that_counts(
    ahead: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others in small pools, preempted and broken into, samples and beams."""
    expected = right()
    if graphs:
        monkeypatch.setitem(RECORDERS, "cpu", record)
    with Engine(
        build(BY_NAME["llama"]),
        block_size=4,
        num_blocks=17,
        max_batch_tokens=16,
        max_batch_sequences=6,
        run_ahead=ahead,
    ) as engine:
        # Captured steps call it rarely.
        assert broken_into(engine, PARAMS, 4 if graphs else 12) == expected
        assert engine.stats()["preemptions"]


def test_penalties_are_of_each_answer() -> None:
    """Samples of one request have counts of their own, under each request's own numbers."""
    model = build(BY_NAME["llama"])
    options = {"do_sample": True, "seed": 5, "num_return_sequences": 4, "max_new_tokens": 30, "top_k": 0}
    with small_engine(model, num_blocks=200) as engine:
        handles = [
            engine.submit(PROMPTS[1], presence_penalty=100.0, **options),
            engine.submit(PROMPTS[1], **options),
        ]
        once, often = checked_answers(engine, handles)
    assert all(len(set(answer)) == len(answer) for answer in once)
    assert any(len(set(answer)) < len(answer) for answer in often)


def test_prompts_of_embeddings_have_answers_that_count() -> None:
    """With the ids that processors see, and without: the answer is the same."""
    model = build(BY_NAME["llama"])
    prompt = PROMPTS[1]
    embeds = model.get_input_embeddings()(torch.tensor(prompt)).detach()
    asked = {"do_sample": False, "max_new_tokens": NEW, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    with small_engine(model, num_blocks=200) as engine:
        found = [
            engine.submit(prompt, **asked),
            engine.submit(inputs_embeds=embeds, **asked),
            engine.submit(prompt, inputs_embeds=embeds, **asked),
        ]
        right, *others = checked_answers(engine, found)
    assert right == counting(model, prompt, asked)
    assert others == [right, right]


def test_logprobs_are_of_the_scores_that_were_chosen_from() -> None:
    """`processed` has the penalties, the raw logprob has not."""
    model = build(BY_NAME["llama"])
    with Engine(model, num_blocks=200) as engine:
        asked = {"do_sample": False, "max_new_tokens": 6, "logprobs": VOCABULARY}
        (output,) = engine.generate([PROMPTS[0]], frequency_penalty=1.5, **asked)
    notes = output.sequences[0].logprobs
    assert notes is not None
    tokens = output.sequences[0].token_ids
    for place, note in enumerate(notes):
        scores = torch.full((VOCABULARY,), -torch.inf)
        for token, logprob in note.top_logprobs:
            scores[token] = logprob - 1.5 * tokens[:place].count(token)
        assert note.processed == pytest.approx(scores.log_softmax(-1)[note.token_id].item(), abs=1e-4)


@pytest.mark.parametrize("drawn", [False, True])
def test_requests_with_openais_options_are_on_the_fast_path(
    drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their steps are captured as their neighbours', no step marks the model dirty, and nothing is slow."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    from hf_paged import demo

    model, tokenizer = demo.model(), demo.tokenizer()
    model.generation_config.eos_token_id = None
    mine = {
        "stop": ["never", "\x00"], "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}
    }  # fmt: skip
    with Engine(model, tokenizer, num_blocks=400, max_batch_sequences=8, run_ahead=True) as engine:
        asked = {"max_new_tokens": 60, "do_sample": drawn}
        prompts = demo.prompts()[:4]
        handles = [
            engine.submit(prompt, **asked, **(mine if i % 2 else {})) for i, prompt in enumerate(prompts)
        ]
        assert all(job_of(handle).params.batchable for handle in handles)
        own_steps(engine, 20)
        dirty: list[bool] = []
        monkeypatch.setattr(CheckPolicy, "mark_dirty", lambda _: dirty.append(True))
        before = engine.stats()["graphs"]["replayed"]
        own_steps(engine, 20)
        assert engine.stats()["graphs"]["replayed"] == before + 20
        assert not dirty
        assert engine.stats()["slow_processors"] == {}
