"""The rows whose tokens are chosen together on the device: each gets what it gets alone."""

from __future__ import annotations

from typing import Any

import pytest
from engine_answers import PROMPTS, alone, answers
from engine_ends import ENDS
from families import BY_NAME, build

from hf_paged.engine import Engine

SAMPLED = {"do_sample": True, "temperature": 1.2, "seed": 5}


@pytest.fixture
def model() -> Any:
    return build(BY_NAME["llama"])


@pytest.fixture(params=[False, True], ids=["at once", "ahead"])
def engine(model: Any, request: pytest.FixtureRequest) -> Engine:
    return Engine(
        model,
        block_size=4,
        num_blocks=80,
        max_batch_tokens=64,
        max_batch_sequences=8,
        run_ahead=request.param,
    )


ASKED: list[dict[str, Any]] = [
    {"do_sample": False, "max_new_tokens": 12},
    {**SAMPLED, "max_new_tokens": 12},
    {"do_sample": False, "max_new_tokens": 20, "eos_token_id": ENDS},
    {**SAMPLED, "top_k": 7, "max_new_tokens": 9, "eos_token_id": ENDS[:2]},
    {"do_sample": False, "repetition_penalty": 1.3, "max_new_tokens": 12},
    {**SAMPLED, "repetition_penalty": 1.3, "max_new_tokens": 12},
]


def test_every_request_gets_what_it_gets_alone(model: Any, engine: Engine) -> None:
    """Greedy and drawn, ended by length and by a token, beside requests with logprobs, processors and several
    samples.
    """
    others: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"encoder_repetition_penalty": 1.3},
        {"num_return_sequences": 2, **SAMPLED},
    ]
    kinds = [*ASKED, *({"do_sample": False, "max_new_tokens": 12, **kind} for kind in others)]
    expected = [
        answers(engine.generate([prompt], **kind)[0])
        for prompt, kind in zip(PROMPTS * 2, kinds, strict=False)
    ]
    handles = [engine.submit(prompt, **kind) for prompt, kind in zip(PROMPTS * 2, kinds, strict=False)]
    while not all(handle.done for handle in handles):
        engine.step()
        engine.check()
    assert [answers(handle.result()) for handle in handles] == expected


def test_each_increment_comes_at_once(engine: Engine) -> None:
    """A handle that is read gets every token in the step in which the host gets it."""
    first, second = (engine.submit(prompt, max_new_tokens=6, do_sample=False) for prompt in PROMPTS[:2])
    said = [increment.token_ids for increment in first]
    assert [len(tokens) for tokens in said] == [1] * 6
    assert [token for tokens in said for token in tokens] == first.result().sequences[0].token_ids
    assert [increment.token_ids for increment in second.read()] == [
        [token] for token in second.result().sequences[0].token_ids
    ]


def test_an_aborted_request_gets_no_token_of_the_step_in_flight(engine: Engine) -> None:
    """C34: an abort in the middle of the batch; another request takes its row, and none the other's token."""
    handles = [engine.submit(prompt, max_new_tokens=14, do_sample=False) for prompt in PROMPTS[:4]]
    for _ in range(5):
        engine.step()
    handles[1].cancel()
    handles.append(engine.submit(PROMPTS[4], max_new_tokens=14, do_sample=False))
    engine.step()
    said = len(handles[1].result().sequences[0].token_ids)
    assert handles[1].result().finish_reason == "abort"
    for _ in range(3):
        engine.step()
        engine.check()
    assert len(handles[1].result().sequences[0].token_ids) == said
    for prompt, handle in zip(PROMPTS[:5], handles, strict=True):
        expected = alone(engine.model, prompt, max_new_tokens=14, do_sample=False)[0]
        assert answers(handle.result())[0] == (expected[:said] if handle is handles[1] else expected)
