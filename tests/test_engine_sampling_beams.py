"""Beams in the batch: equal to generate() on that prompt alone, scores and logprobs included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import TOLERANCE
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, VOCABULARY, build
from transformers import StoppingCriteria

from hf_paged.engine import Engine

ENDS = [2, 7, 9, 11, 13, 20, 30, 40, 50]


class LongEnough(StoppingCriteria):
    """Ends a beam at an even token behind its tenth."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] % 2 == 0) & torch.tensor(input_ids.shape[1] > 20)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"num_beams": 4, "num_return_sequences": 3},
    "short": {"num_beams": 4, "length_penalty": -1.0, "eos_token_id": ENDS, "num_return_sequences": 2},
    "early": {"num_beams": 3, "early_stopping": True, "eos_token_id": ENDS, "num_return_sequences": 3},
    "never": {
        "num_beams": 2,
        "early_stopping": "never",
        "length_penalty": 1.5,
        "eos_token_id": ENDS,
        "num_return_sequences": 2,
    },
    "no-ends": {"num_beams": 2, "eos_token_id": None},
    "processors": {
        "num_beams": 4,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "num_return_sequences": 4,
    },
    "least": {"num_beams": 3, "min_new_tokens": 5, "eos_token_id": ENDS, "bad_words_ids": [[17], [18, 19]]},
    "criterion": {"num_beams": 3, "stopping_criteria": [LongEnough()], "num_return_sequences": 3},
    "one-token": {"num_beams": 3, "max_new_tokens": 1, "num_return_sequences": 3},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return build(BY_NAME["llama"])


@pytest.mark.parametrize("way", WAYS)
def test_beams_equal_generate_alone(model: Any, way: str) -> None:
    """C16: several searches at once, in chunks, under pressure, beside requests that are none."""
    options = {"max_new_tokens": 14, "do_sample": False, **WAYS[way]}
    prompts = PROMPTS[:4]
    with Engine(model, block_size=4, num_blocks=44, max_batch_tokens=20, max_batch_sequences=12) as engine:
        handles = [engine.submit(prompt, logprobs=2, **options) for prompt in prompts]
        other = engine.submit(PROMPTS[5], max_new_tokens=20, do_sample=False)
        outputs = [handle.result() for handle in handles]
        assert len(other.result().sequences[0].token_ids) > 0
        engine.check()
    for prompt, output in zip(prompts, outputs, strict=True):
        right = model.generate(
            torch.tensor([prompt]),
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            **options,
        )
        lengths = (right.beam_indices >= 0).sum(1).tolist()
        for i, (sequence, length) in enumerate(zip(output.sequences, lengths, strict=True)):
            assert sequence.token_ids == right.sequences[i, len(prompt) : len(prompt) + length].tolist()
            assert sequence.score == pytest.approx(float(right.sequences_scores[i]), abs=TOLERANCE)
            logprobs = [
                float(step[beam].log_softmax(-1)[token])
                for step, beam, token in zip(
                    right.logits, right.beam_indices[i].tolist(), sequence.token_ids, strict=False
                )
            ]
            assert [note.logprob for note in sequence.logprobs] == pytest.approx(logprobs, abs=TOLERANCE)
            assert sequence.finish_reason in ("stop", "length")
            assert (sequence.finish_reason == "length") == (
                length == options["max_new_tokens"] and not _ends(sequence, options, prompt)
            )


SIDE_BY_SIDE: list[dict[str, Any]] = [
    {"num_beams": 4, "num_return_sequences": 4},
    {"num_beams": 4, "length_penalty": -1.0, "num_return_sequences": 2},
    {"num_beams": 4, "length_penalty": 0.3, "early_stopping": "never", "num_return_sequences": 4},
    {"num_beams": 3, "early_stopping": True, "eos_token_id": ENDS, "num_return_sequences": 3},
    {"num_beams": 3, "length_penalty": 2.0, "eos_token_id": ENDS[:5], "num_return_sequences": 3},
    {"num_beams": 3, "eos_token_id": ENDS, "max_new_tokens": 9, "num_return_sequences": 3},
    {"num_beams": 4, "repetition_penalty": 1.5, "num_return_sequences": 2},
    {"num_beams": 4, "stopping_criteria": [LongEnough()], "num_return_sequences": 4},
    {"num_beams": 2, "eos_token_id": None, "max_new_tokens": 21},
]


@pytest.mark.parametrize("ahead", [False, True])
def test_searches_of_all_shapes_in_one_batch(model: Any, ahead: bool) -> None:
    """C16: of different widths, ends, penalties and lengths, some that are compared together and some by
    themselves.
    """
    params = [
        (PROMPTS[i % 4], {"max_new_tokens": 14, "do_sample": False, **kind})
        for i, kind in enumerate(SIDE_BY_SIDE)
    ]
    greedy = {"max_new_tokens": 20, "do_sample": False}
    with Engine(
        model, block_size=4, num_blocks=300, max_batch_tokens=64, max_batch_sequences=40, run_ahead=ahead
    ) as engine:
        handles = [
            engine.submit(prompt, logprobs=i % 3 or None, **options)
            for i, (prompt, options) in enumerate(params)
        ]
        handles.append(engine.submit(PROMPTS[5], **greedy))
        most = 0
        while not all(handle.done for handle in handles):
            engine.step()
            engine.check()
            most = max(most, engine.stats()["running"])
        assert most == len(handles)
    for i, ((prompt, options), handle) in enumerate(
        zip([*params, (PROMPTS[5], greedy)], handles, strict=True)
    ):
        output = handle.result()
        assert answers(output) == alone(model, prompt, **options)
        for sequence in output.sequences:
            if i % 3 and i < len(params):
                assert [(note.token_id, len(note.top_logprobs)) for note in sequence.logprobs] == [
                    (t, i % 3) for t in sequence.token_ids
                ]
            else:
                assert sequence.logprobs is None


def _ends(sequence: Any, options: dict[str, Any], prompt: list[int]) -> bool:
    last = sequence.token_ids[-1]
    by_criterion = (
        "stopping_criteria" in options and last % 2 == 0 and len(prompt) + len(sequence.token_ids) > 20
    )
    return last in (options.get("eos_token_id", [2]) or []) or by_criterion


def tokens(output: Any) -> list[list[int]]:
    return [sequence.token_ids for sequence in output.sequences]


def test_beam_sampling_is_the_requests_own(model: Any) -> None:
    """C35: a seed decides, whoever else is there."""
    options = {
        "num_beams": 3,
        "do_sample": True,
        "num_return_sequences": 3,
        "max_new_tokens": 10,
        "temperature": 1.5,
    }
    with Engine(model, num_blocks=100, prefix_caching=False) as engine:
        alone = [engine.generate([prompt], seed=4, **options)[0] for prompt in PROMPTS]
        other = engine.generate([PROMPTS[0]], seed=5, **options)[0]
    with Engine(model, block_size=2, num_blocks=100, max_batch_tokens=9, max_batch_sequences=9) as engine:
        together = engine.generate(PROMPTS, seed=4, **options)
    assert [tokens(output) for output in alone] == [tokens(output) for output in together]
    assert tokens(alone[0]) != tokens(other)


def test_nothing_is_said_before_the_end(model: Any) -> None:
    """Which beam wins is not known before; then it comes at once."""
    with Engine(model, num_blocks=50) as engine:
        increments = list(
            engine.stream(PROMPTS[1], num_beams=2, num_return_sequences=2, max_new_tokens=6, do_sample=False)
        )
    assert [increment.index for increment in increments] == [0, 1]
    assert all(
        len(increment.token_ids) == 6 and increment.finish_reason == "length" for increment in increments
    )


def test_wide_beams_of_a_small_vocabulary(model: Any) -> None:
    """More continuations are looked at than one beam has tokens."""
    options = {
        "num_beams": 24,
        "num_return_sequences": 24,
        "max_new_tokens": 3,
        "do_sample": False,
        "eos_token_id": ENDS,
    }
    right = model.generate(
        torch.tensor([PROMPTS[0]]), return_dict_in_generate=True, output_scores=True, **options
    )
    with Engine(model, num_blocks=60, max_batch_sequences=24) as engine:
        output = engine.generate([PROMPTS[0]], **options)[0]
    assert VOCABULARY < 240
    assert tokens(output) == [
        row[3 : 3 + length].tolist()
        for row, length in zip(right.sequences, (right.beam_indices >= 0).sum(1).tolist(), strict=True)
    ]
