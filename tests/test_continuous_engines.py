"""Engines of a model between calls: managers that agree share one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from batch_managers import GUARD, NEW, alone, batching_model, greedy, manager_of  # noqa: F401  # a fixture
from dropout import train_with_dropout
from engine_answers import PROMPTS
from transformers import ContinuousBatchingConfig

from hf_paged.continuous.engines import PLACE


def test_an_engine_stays_with_its_model_between_calls(model: Any) -> None:
    """New weights give new tokens; the engine, its pool and its mode stay; a copy of the model has none."""
    model.train()
    engines, answers = set(), set()
    for _ in range(3):
        found = model.generate_batch(PROMPTS[1:3], generation_config=greedy())
        engines.add(id(getattr(model, PLACE).engine))
        answers.add(str([each.generated_tokens for each in found.values()]))
        assert [each.generated_tokens for each in found.values()] == [
            alone(model, each) for each in PROMPTS[1:3]
        ]
        ids = torch.tensor([PROMPTS[1]])
        model(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), 5.0).step()
        assert model.training
    assert len(engines) == 1
    assert len(answers) > 1
    assert getattr(copy.deepcopy(model), PLACE).engine is None
    model.to(torch.bfloat16)
    found = model.generate_batch(PROMPTS[1:3], generation_config=greedy())
    assert all(len(each.generated_tokens) == NEW for each in found.values())


def test_more_requests_at_once_than_a_step_has_tokens_by_default(model: Any) -> None:
    config = ContinuousBatchingConfig(max_requests_per_batch=4096)
    found = model.generate_batch(PROMPTS[1:2], greedy(), config)
    assert found["req_0"].generated_tokens == alone(model, PROMPTS[1])


def test_managers_share_an_engine(model: Any) -> None:
    """The first that ends leaves it to the others, as it does the model's mode; none of them resumes it while
    another changes weights.
    """
    expected = alone(model, PROMPTS[1], max_new_tokens=60)
    train_with_dropout(model)
    first, second, third = managers = [manager_of(model) for _ in range(3)]
    for each in managers:
        each.start()
    first.stop(timeout=GUARD)
    assert not model.training
    with second.pause():
        with third.pause():
            pass
        number = second.add_request(PROMPTS[1], max_new_tokens=60)
        assert second.get_result(timeout=0.3) is None
    third.stop(timeout=GUARD)
    output = second.get_result(number, timeout=GUARD)
    assert output.generated_tokens == expected
    engine = second.engine
    assert engine.driven
    second.stop(timeout=GUARD)
    assert model.training
    assert not engine.driven
    assert not engine.closed
