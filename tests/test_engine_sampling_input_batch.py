"""The crew's jobs: one choice and one list of tokens for all of them, and nobody notices who his neighbours
are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, alone, answers
from engine_ends import ENDS
from families import BY_NAME, build
from tape import record

from hf_paged.engine import Engine
from hf_paged.engine.forward_batch import ForwardBatch, LastTokens, ScheduledChunk
from hf_paged.model.capture.rehearsal import RECORDERS

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


def crew(engine: Engine) -> list[int]:
    return sorted(sequence.group.request.number for sequence in engine._scheduler.crew.sequences)


ASKED: list[dict[str, Any]] = [
    {"do_sample": False, "max_new_tokens": 12},
    {**SAMPLED, "max_new_tokens": 12},
    {"do_sample": False, "max_new_tokens": 20, "eos_token_id": ENDS},
    {**SAMPLED, "top_k": 7, "max_new_tokens": 9, "eos_token_id": ENDS[:2]},
    {"do_sample": False, "repetition_penalty": 1.3, "max_new_tokens": 12},
    {**SAMPLED, "repetition_penalty": 1.3, "max_new_tokens": 12},
]


def test_everybody_in_the_crew_gets_what_he_gets_alone(model: Any, engine: Engine) -> None:
    """Greedy and drawn, ended by length and by a token; who asks for more than a token a step is not among
    them.
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
    numbers = [handle.number for handle in handles]
    seen = set()
    while not all(handle.done for handle in handles):
        engine.step()
        engine.check()
        seen.update(crew(engine))
    assert seen == set(numbers[: len(ASKED)])
    assert [answers(handle.result()) for handle in handles] == expected


def test_each_increment_is_told_at_once(engine: Engine) -> None:
    """A handle that is read gets every token in the step that the host has heard of it."""
    first, second = (engine.submit(prompt, max_new_tokens=6, do_sample=False) for prompt in PROMPTS[:2])
    said = [increment.token_ids for increment in first]
    assert [len(tokens) for tokens in said] == [1] * 6
    assert [token for tokens in said for token in tokens] == first.result().sequences[0].token_ids
    assert second.result().sequences[0].token_ids == second._job.streams[0].tokens


def test_who_leaves_while_a_step_is_on_its_way_gets_no_more(engine: Engine) -> None:
    """C34: an abort in the middle of the crew; the last one takes the place, and nobody the other's token."""
    handles = [engine.submit(prompt, max_new_tokens=14, do_sample=False) for prompt in PROMPTS[:4]]
    for _ in range(5):
        engine.step()
    handles[1].cancel()
    engine.step()
    said = len(handles[1].result().sequences[0].token_ids)
    assert handles[1].result().finish_reason == "abort"
    for _ in range(3):
        engine.step()
        engine.check()
    assert len(handles[1].result().sequences[0].token_ids) == said
    for prompt, handle in zip(PROMPTS[:4], handles, strict=True):
        expected = alone(engine.model, prompt, max_new_tokens=14, do_sample=False)[0]
        assert answers(handle.result())[0] == (expected[:said] if handle is handles[1] else expected)


def test_the_crews_ids_stay_on_the_device_while_nobody_comes_or_goes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    ids = ForwardBatch.ids

    def watched(self: ForwardBatch, device: torch.device) -> torch.Tensor:
        assert self.stride is not None
        found = ids(self, device)
        tokens = self._latest.tokens
        seen.append(
            (
                self._latest.crew is self.stride.sequences,
                tokens is not None and found.data_ptr() == tokens.data_ptr(),
            )
        )
        if not engine._steps.ahead:
            assert found.tolist() == [sequence.tokens[-1] for sequence in self.stride.sequences]
        return found

    monkeypatch.setattr(ForwardBatch, "ids", watched)
    monkeypatch.setitem(RECORDERS, "cpu", record)
    prompts = PROMPTS[:3]
    outputs = engine.generate(prompts, max_new_tokens=16, do_sample=False)
    assert [answers(output) for output in outputs] == [
        alone(engine.model, p, max_new_tokens=16, do_sample=False) for p in prompts
    ]
    assert all(same == stays for same, stays in seen)
    assert engine._steps.ahead == (sum(same for same, _ in seen) > 8)


def test_pieces_are_those_of_the_plan(engine: Engine) -> None:
    for prompt in PROMPTS[:3]:
        engine.submit(prompt, max_new_tokens=16, do_sample=False)
    for _ in range(3):
        engine.step()
    engine._steps.finish_in_flight()
    plan = engine._scheduler.schedule()
    assert plan.stride is not None
    pieces = ForwardBatch(plan, LastTokens(), {})
    assert len(pieces) == len(plan.rows) == pieces.crew == 3
    assert list(pieces) == [
        ScheduledChunk([row.sequence.tokens[row.start]], row.start, row.sequence.tables, True)
        for row in plan.rows
    ]
    assert pieces[1] == list(pieces)[1]
