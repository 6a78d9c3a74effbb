"""Options of OpenAI's requests: what they mean in the words of generate(), and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_answers import PROMPTS, alone, answers
from engine_steps import job_of
from families import BY_NAME, VOCABULARY, build
from transformers import GenerationConfig

from hf_paged.engine import Engine
from hf_paged.engine.sampling.parameters import PENALTIES, has_any

PROMPT = PROMPTS[0]
NEW = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine(build(BY_NAME["llama"]), num_blocks=200) as made:
        yield made


def test_biases_are_those_of_sequences_of_one_token(engine: Engine) -> None:
    """As in generate(); a token with a large one comes at once."""
    biases = {7: 3.0, 11: -100, np.int64(19): 2}
    found = answers(engine.generate([PROMPT], logit_bias=biases, **NEW)[0])
    right = {(int(token),): float(bias) for token, bias in biases.items()}
    assert found == alone(engine.model, PROMPT, sequence_bias=right, **NEW)
    assert answers(engine.generate([PROMPT], logit_bias={7: 1e4}, **NEW)[0]) == [[7] * 8]


@pytest.mark.parametrize(
    "given", [{(7,): 1.0, (5, 9): -2.0}, [[[7], 1.0], [[5, 9], -2.0]]], ids=["dict", "list"]
)
def test_biases_are_added_to_those_of_sequences(engine: Engine, given: Any) -> None:
    """Those of keywords and of configs; the caller's objects stay as they are."""
    config = GenerationConfig(sequence_bias=given, **NEW)
    for asked in ({"sequence_bias": given, **NEW}, {"generation_config": config}):
        params = job_of(engine.submit(PROMPT, logit_bias={7: 0.5, 8: 1}, **asked)).params
        assert params.config.sequence_bias == {(7,): 1.5, (5, 9): -2.0, (8,): 1.0}
        assert params.batchable
    assert config.sequence_bias == given
    plain = job_of(engine.submit(PROMPT, **NEW)).params
    assert plain.config.sequence_bias is None


def test_nothing_given_is_nothing(engine: Engine) -> None:
    """As clients send it: None and 0 add no processor."""
    asked = {"presence_penalty": 0, "frequency_penalty": None, "logit_bias": {}, "stop": []}
    params = job_of(engine.submit(PROMPT, **asked, **NEW)).params
    assert list(params.processors) == []
    assert params.stop is None
    assert params.warp is not None
    assert not has_any(params.warp, PENALTIES)


def test_an_int_is_a_number(engine: Engine) -> None:
    for number in (1, np.float32(1), 1.0):
        warp = job_of(engine.submit(PROMPT, presence_penalty=number, **NEW)).params.warp
        assert warp == {"presence": 1.0}


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"presence_penalty": "0.5"}, TypeError, "presence_penalty is a number, got str '0.5'; give one as 0.5"),
        ({"frequency_penalty": True}, TypeError, "frequency_penalty is a number, got bool True"),
        ({"frequency_penalty": float("nan")}, ValueError, "frequency_penalty=nan is not finite; give"),
        ({"presence_penalty": float("inf")}, ValueError, "presence_penalty=inf is not finite; give"),
        ({"presence_penalty": torch.tensor([1.0, 2.0])}, TypeError, "presence_penalty is a number, got Tensor"),
        ({"logit_bias": [5]}, TypeError, "logit_bias is a mapping of token ids to numbers, got list [5]; give"),
        ({"logit_bias": {"5": 1.0}}, TypeError, "logit_bias has the key str '5', expected a token id; give int"),
        ({"logit_bias": {True: 1.0}}, TypeError, "logit_bias has the key bool True"),
        ({"logit_bias": {VOCABULARY: 1.0}}, ValueError, f"token id {VOCABULARY} of logit_bias is not one of the"),
        ({"logit_bias": {-1: 1.0}}, ValueError, f"one of the {VOCABULARY} of the vocabulary; leave it out"),
        ({"logit_bias": {5: "a"}}, TypeError, "logit_bias[5] is a number, got str 'a'"),
        ({"logit_bias": {5: float("inf")}}, ValueError, "logit_bias[5]=inf is not finite"),
        ({"stop": 3}, ValueError, "stop is a string or a list of strings, got int 3; leave it out for none"),
        ({"stop": ["a", ""]}, ValueError, "has an empty string, with which every text ends; leave it out"),
        ({"presence_penalties": 1.0}, ValueError, "did you mean 'presence_penalty'?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_what_to_do(
    engine: Engine, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind) as found:
        engine.submit(PROMPT, **options)
    assert says in str(found.value)
