"""What captured steps answer: logits, and the greedy choice made with them, in memory that the next step
writes over.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, build
from tape import record

from hf_paged.engine import Engine
from hf_paged.engine.sampling.answers import Answer, place_for
from hf_paged.engine.sampling.warp import best, mend
from hf_paged.model.capture.rehearsal import RECORDERS
from hf_paged.scheduling import UNKNOWN

CPU = torch.device("cpu")


def test_an_answer_is_said_anew_in_place() -> None:
    place = place_for(4, 6, CPU)
    answer = place.first(3)
    scores = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    answer.enter(scores.bfloat16())
    assert torch.equal(place.logits[:3], scores.bfloat16().float())
    assert answer.best is not None
    assert answer.best.tolist() == [place.logits[:3].argmax(-1).tolist()] * 2
    kept = answer.best.clone()
    answer.enter(scores.roll(1, 1))
    assert not torch.equal(answer.best, kept)


def test_logits_without_an_answer_are_reported() -> None:
    """Where there is NaN some token of the vocabulary goes on, and the host is told that there is none."""
    scores = torch.tensor([[1.0, 3.0, 2.0], [1.0, torch.nan, 5.0], [torch.inf, 0.0, 0.0]])
    tokens, told = best(scores)
    assert tokens.tolist() == [1, 1, 0]
    assert told.tolist() == [1, UNKNOWN, 0]
    chosen = torch.stack([tokens, told])
    chosen[0, 2] = 3  # a draw that found nothing
    tokens, told = mend(chosen, 3)
    assert tokens.tolist() == [1, 1, 2]
    assert told.tolist() == [1, UNKNOWN, UNKNOWN]
    assert Answer(scores).first(2).best is None


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_of_a_captured_step_that_has_no_token(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the crew comes to a token whose embedding is NaN while its steps are replayed: it ends there,
    its neighbours go on.
    """
    monkeypatch.setitem(RECORDERS, "cpu", record)
    model, options = build(BY_NAME["llama"]), {"do_sample": False, "max_new_tokens": 16}
    right: list[Any] = [alone(model, prompt, **options) for prompt in PROMPTS[:3]]
    seen = {token for row in right[1:] for token in row[0]} | {
        token for prompt in PROMPTS[:3] for token in prompt
    }
    place = next(i for i, token in enumerate(right[0][0]) if i > 6 and token not in seen)
    with Engine(model, block_size=4, run_ahead=ahead) as engine:
        with torch.no_grad():
            model.get_input_embeddings().weight[right[0][0][place]] = torch.nan
        outputs = engine.generate(PROMPTS[:3], **options)
        assert engine.stats()["graphs"]["replayed"] > 6
        engine.check()
    assert outputs[0].finish_reason == "error"
    assert "NaN" in str(outputs[0].error)
    first = right[0][0].index(right[0][0][place])
    assert outputs[0].sequences[0].token_ids == right[0][0][: first + 1]
    assert [answers(output) for output in outputs[1:]] == right[1:]
