"""Forwards in torch's inference mode: when, and that nobody meets a tensor that was made in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, build
from tape import record

from hf_paged.engine import Engine
from hf_paged.engine import eager as eager_module
from hf_paged.generate import forward as forward_module
from hf_paged.model import inference
from hf_paged.model.capture.rehearsal import RECORDERS

SHORT = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
IDS = torch.tensor([PROMPTS[0]])


@pytest.fixture
def model() -> Any:
    return build(BY_NAME["llama"])


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models of forwards in inference mode; the list grows."""
    seen: list[Any] = []

    def watched(model: Any, forward: Callable[[], Any]) -> Any:
        seen.append(model)
        return inference.in_inference_mode(model, forward)

    for module in (forward_module, eager_module):
        monkeypatch.setattr(module, "in_inference_mode", watched)
    return seen


class _Own(torch.nn.Linear):
    """A module of the user's."""


def hooked(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


def replaced(model: Any) -> None:
    model.lm_head.__class__ = _Own


def patched(model: Any) -> None:
    inner = model.model.forward
    model.model.forward = lambda *args, **kwargs: inner(*args, **kwargs)


def long(model: Any) -> None:
    model.model.rotary_emb.rope_type = "dynamic"


def made_in_it(model: Any) -> None:
    with torch.inference_mode():
        model.model.norm.weight = torch.nn.Parameter(torch.ones_like(model.model.norm.weight), False)


def leaving(model: Any) -> None:
    inference.in_inference_mode(model, lambda: setattr(model, "kept", torch.ones(2) * 2))


@pytest.mark.parametrize("change", [hooked, replaced, patched, long, made_in_it, leaving])
def test_which_models_it_suits(model: Any, change: Callable[[Any], None]) -> None:
    assert inference.suits_inference_mode(model)
    change(model)
    assert not inference.suits_inference_mode(model)


def test_when_it_suits_none(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autocast("cpu"):
        assert not inference.suits_inference_mode(model)
    assert not inference.suits_inference_mode(model.train())
    assert inference.suits_inference_mode(model.eval())
    monkeypatch.setitem(RECORDERS, "cpu", record)
    assert not inference.suits_inference_mode(model)


def test_what_a_forward_leaves_in_a_model_is_ordinary(model: Any) -> None:
    leaving(model)
    assert not model.kept.is_inference()
    assert model.kept.tolist() == [2, 2]


def test_generate_gives_ordinary_tensors(model: Any, used: list[Any]) -> None:
    wanted = {
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
    }
    stock = model.generate(IDS, **SHORT, **wanted)
    paged = model.generate(IDS, **SHORT, **wanted, cache_implementation="paged")
    assert used
    assert torch.equal(stock.sequences, paged.sequences)
    states = [state for step in paged.hidden_states for state in step]
    weights = [weight for step in paged.attentions for weight in step]
    for tensor in (*paged.logits, *states, *weights):
        assert not tensor.is_inference()
        tensor.add_(1)
    layer = paged.past_key_values.layers[0]
    assert not layer.keys.dense().is_inference()


def test_code_of_the_user_between_the_steps(model: Any, used: list[Any]) -> None:
    def change(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.mul_(-1)

    stock = model.generate(IDS, **SHORT, logits_processor=[change])
    paged = model.generate(IDS, **SHORT, logits_processor=[change], cache_implementation="paged")
    assert torch.equal(stock, paged)
    assert not used


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_that_are_in_it_themselves(model: Any, mode: Any) -> None:
    stock = model.generate(IDS, **SHORT)
    with mode():
        paged = model.generate(IDS, **SHORT, cache_implementation="paged")
    assert torch.equal(stock, paged)


def test_an_engine_gives_ordinary_tensors(model: Any, used: list[Any]) -> None:
    def change(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.mul_(-1)

    with Engine(model, block_size=4, num_blocks=64) as engine:
        plain = engine.generate(PROMPTS[:3], **SHORT)
        assert used
        (own,) = engine.generate(PROMPTS[:1], **SHORT, logits_processor=[change])
        (told,) = engine.generate(PROMPTS[:1], **SHORT, logprobs=2)
        (beams,) = engine.generate(PROMPTS[:1], **SHORT, num_beams=3)
    assert [answers(each) for each in plain] == [alone(model, prompt, **SHORT) for prompt in PROMPTS[:3]]
    assert answers(own) == alone(model, PROMPTS[0], **SHORT, logits_processor=[change])
    assert answers(told) == answers(plain[0])
    assert answers(beams) == alone(model, PROMPTS[0], **SHORT, num_beams=3)


def test_a_model_is_trained_afterwards(model: Any, used: list[Any]) -> None:
    model.generate(IDS, **SHORT, cache_implementation="paged")
    with Engine(model, block_size=4, num_blocks=64) as engine:
        engine.generate(PROMPTS[:1], **SHORT)
    assert used
    model.train()
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
