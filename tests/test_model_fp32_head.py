"""Engines with lm_head_fp32=True: logits in float32 from the last hidden state and the head's weight."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from typing import Any

import pytest
import torch
from adapters import lora
from captures import counts, policy, reasons
from invariance import compiles, engine_numbers, model_of, trainer_numbers
from releases import require_own_adapters
from tape import record
from torch import nn

import hf_paged
from hf_paged import Engine
from hf_paged.model.rehearsal import RECORDERS

NAMES = ["llama", "gpt2", "gemma2", "granite", "cohere", "qwen3_moe"]
NEW = 6


def with_fp32_head(model: Any) -> Any:
    """A copy as TRL makes it: the head's own weight in float32, and inputs converted before it."""
    model = copy.deepcopy(model)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().float())
    head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    return model


def numbers(model: Any, rows: list[list[int]], **options: Any) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities that an engine finds greedily."""
    with Engine(model, **options) as engine:
        wanted = {"max_new_tokens": NEW, "do_sample": False, "logprobs": True, "pad_token_id": 0}
        handles = [engine.submit(row, **wanted) for row in rows]
        found = [handle.result() for handle in handles]
        engine.check()
    for each in found:
        assert each.error is None, each.error
    return [[(token.token_id, token.logprob) for token in each.sequences[0].logprobs] for each in found]


ROWS = [[7, 9, 11, 13], [21, 5, 17], [31, 8, 8, 40, 12, 6]]


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_of_a_float32_head(name: str) -> None:
    """Tied heads, caps and scales included; what the half head rounds away is seen without the option."""
    model = model_of(name, torch.bfloat16)
    found = numbers(model, ROWS, lm_head_fp32=True, block_size=4)
    assert found == numbers(with_fp32_head(model), ROWS, block_size=4)
    assert found != numbers(model, ROWS, block_size=4)
    assert "forward" not in model.get_output_embeddings().__dict__
    assert model.get_output_embeddings().weight.dtype == torch.bfloat16


@compiles
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_a_trainers_float32_head(name: str) -> None:
    """C44: batch_invariant=True with lm_head_fp32=True, against a trainer whose head is float32."""
    model = model_of(name, torch.bfloat16)
    sequences, together, alone = engine_numbers(model, lm_head_fp32=True)
    assert together == alone
    for side in ("left", "right"):
        assert trainer_numbers(with_fp32_head(model), sequences, side) == together
    assert trainer_numbers(model, sequences, "left") != together


def test_float32_models_stay_as_they_are() -> None:
    """The same tokens with the same bits; and of a model whose head alone is float32."""
    model = model_of("llama")
    assert numbers(model, ROWS, lm_head_fp32=True) == numbers(model, ROWS)
    model = with_fp32_head(model_of("llama", torch.bfloat16))
    assert numbers(model, ROWS, lm_head_fp32=True) == numbers(model, ROWS)


def test_weights_that_a_trainer_steps() -> None:
    """The next step converts the new weight."""
    model = model_of("llama", torch.bfloat16)
    with Engine(model, lm_head_fp32=True, prefix_caching=False) as engine:
        wanted = {"max_new_tokens": 1, "do_sample": False, "logprobs": True, "pad_token_id": 0}
        before = engine.submit(ROWS[0], **wanted).result().sequences[0].logprobs
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(-1)
        after = engine.submit(ROWS[0], **wanted).result().sequences[0].logprobs
    assert [token.logprob for token in before] != [token.logprob for token in after]
    assert [(token.token_id, token.logprob) for token in after] == numbers(
        model, ROWS, lm_head_fp32=True, prefix_caching=False
    )[0][:1]


def test_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays convert the weight anew: their numbers are those of steps operation by operation."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, after=0, least_steps=0)
    model = model_of("llama", torch.bfloat16)
    wanted = {"max_new_tokens": 12, "do_sample": False, "logprobs": True, "pad_token_id": 0}
    found = []
    with Engine(model, lm_head_fp32=True, block_size=4, num_blocks=60) as engine:
        for _ in range(2):
            output = engine.submit(ROWS[0], **wanted).result()
            found.append([(token.token_id, token.logprob) for token in output.sequences[0].logprobs])
            assert counts(engine)["replayed"] > 0, reasons(engine)
            with torch.no_grad():
                model.get_output_embeddings().weight.mul_(-1)
    for sign, answer in zip((1, -1), found, strict=True):
        plain = with_fp32_head(model)
        with torch.no_grad():
            plain.get_output_embeddings().weight.mul_(sign)
        ids = torch.tensor([[*ROWS[0], *(token for token, _ in answer)]])
        right = plain(ids).logits[0].log_softmax(-1)
        for place, (token, logprob) in enumerate(answer):
            assert abs(right[len(ROWS[0]) + place - 1, token].item() - logprob) < 2e-3


def test_other_threads_have_the_models_own_head() -> None:
    """A processor runs within a step, a thread of the user's at any time."""
    model = model_of("llama", torch.bfloat16)
    head = model.get_output_embeddings()
    seen: list[torch.dtype] = []
    mine: list[torch.dtype] = []

    def elsewhere(module: Any, inputs: Any) -> None:
        if threading.current_thread() is not main:
            return
        other = threading.Thread(target=lambda: seen.append(head(inputs[0]).dtype))
        other.start()
        other.join()

    main = threading.current_thread()
    hooks = [
        head.register_forward_pre_hook(elsewhere),
        head.register_forward_hook(lambda module, inputs, answer: mine.append(answer.dtype)),
    ]
    numbers(model, ROWS[:1], lm_head_fp32=True)
    for hook in hooks:
        hook.remove()
    assert set(seen) == {torch.bfloat16}
    assert set(mine) == {torch.bfloat16, torch.float32}


def test_generate_with_a_head_that_is_float32_itself() -> None:
    """A paged generate() computes the model's own forward; the engine has the same logits of it."""
    model = with_fp32_head(model_of("llama", torch.bfloat16))
    ids = torch.tensor(ROWS[:1])
    wanted = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    paged = {"cache_implementation": "paged", "return_dict_in_generate": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_paged.FallbackWarning)
        output = model.generate(ids, **wanted, **paged)
    assert {each.dtype for each in output.logits} == {torch.float32}
    found = [token for token, _ in numbers(model, ROWS[:1])[0]]
    assert output.sequences[0, len(ROWS[0]) :].tolist()[: len(found)] == found


def test_a_head_with_an_adapter_of_later() -> None:
    """transformers' own methods put it into the model: requests from then on are told."""
    require_own_adapters()
    plain = model_of("llama", torch.bfloat16)
    with Engine(plain, lm_head_fp32=True) as engine:
        plain.add_adapter(lora(r=4, target_modules=["lm_head"]), "b")
        output = engine.submit(ROWS[0], max_new_tokens=2, pad_token_id=0).result()
        assert "needs a head that is a plain nn.Linear" in str(output.error)


def test_refused_heads() -> None:
    """By name: when the engine is made, and where an adapter comes later."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        model_of("llama", torch.bfloat16), lora(r=4, target_modules=["q_proj", "lm_head"])
    )
    with pytest.raises(ValueError, match=r"a plain nn\.Linear, LlamaForCausalLM has peft\."):
        Engine(adapted, lm_head_fp32=True)
    plain = model_of("llama", torch.bfloat16)
    with (
        Engine(plain, lm_head_fp32=True) as engine,
        pytest.raises(ValueError, match="lm_head_fp32=True and the adapter 'a' of lm_head"),
    ):
        engine.add_adapter("a", peft.get_peft_model_state_dict(adapted), adapted.peft_config["default"])
    model = model_of("llama", torch.bfloat16)
    forward = type(model).forward

    def rounding(*args: Any, **kwargs: Any) -> Any:
        answer = forward(model, *args, **kwargs)
        answer.logits = answer.logits.to(torch.bfloat16)
        return answer

    rounding.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    model.forward = rounding
    with pytest.raises(ValueError, match=r"rounds logits to torch\.bfloat16 behind its head"):
        Engine(model, lm_head_fp32=True)
    model = model_of("llama", torch.bfloat16)
    model.get_output_embeddings().forward = lambda x: x
    with pytest.raises(ValueError, match=r"needs a head that is a plain nn\.Linear"):
        Engine(model, lm_head_fp32=True)
    with pytest.raises(TypeError, match="lm_head_fp32 must be True or False, got 1"):
        Engine(model, lm_head_fp32=1)  # type: ignore[arg-type]  # the point
