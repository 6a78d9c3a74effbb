"""hf_paged.trl: rollouts of a trainer's own model, with the log-probabilities of the sampler (C24)."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_paged import demo
from hf_paged.continuous.engines import drop_engine
from hf_paged.trl import rollout_func

NEW = 6


@pytest.fixture
def trainer() -> Any:
    """What rollout_func reads of a trainer."""
    model = demo.model().float().train()
    accelerator = SimpleNamespace(state=SimpleNamespace(), unwrap_model=lambda model: model)
    config = GenerationConfig(
        max_new_tokens=NEW,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        disable_compile=True,
        cache_implementation="paged",
    )
    yield SimpleNamespace(
        accelerator=accelerator, model=model, generation_config=config, processing_class=demo.tokenizer()
    )
    drop_engine(model)


def _worst(trainer: Any, found: dict[str, Any]) -> float:
    """How far the log-probabilities are from those of the trainer's forward."""
    worst = 0.0
    for prompt, new, own in zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True):
        assert 0 < len(new) == len(own) <= NEW
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
        scores = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(new)[:, None])[:, 0]
        worst = max(worst, (scores - torch.tensor(own)).abs().max().item())
    return worst


def test_every_row_has_its_completion_and_the_samplers_logprobs(trainer: Any) -> None:
    first, second = demo.prompts()[:2]
    rows = [first, first, second, first]
    torch.manual_seed(3)
    found = rollout_func(rows, trainer)
    assert found["prompt_ids"] == trainer.processing_class(text=rows)["input_ids"]
    assert len({tuple(found["completion_ids"][i]) for i in (0, 1, 3)}) > 1
    assert _worst(trainer, found) < 1e-4
    assert trainer.model.training
    torch.manual_seed(3)
    assert rollout_func(rows, trainer)["completion_ids"] == found["completion_ids"]


def test_new_weights_are_seen(trainer: Any) -> None:
    rows = demo.prompts()[:2]
    rollout_func(rows, trainer)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(0.9)
    assert _worst(trainer, rollout_func(rows, trainer)) < 1e-4


def test_what_it_does_not_take_is_refused(trainer: Any) -> None:
    chat = [{"role": "user", "content": [{"type": "image", "image": None}]}]
    with pytest.raises(ValueError, match="with pictures leave it out"):
        rollout_func([chat], trainer)
    trainer.generation_config.max_new_tokens = None
    with pytest.raises(ValueError, match="max_completion_length"):
        rollout_func(demo.prompts()[:1], trainer)
    trainer.accelerator.state.fsdp_plugin = object()
    with pytest.raises(ValueError, match=r"FSDP divides .*cache_implementation"):
        rollout_func(demo.prompts()[:1], trainer)


@pytest.mark.skipif(
    find_spec("trl") is None or find_spec("datasets") is None, reason="needs TRL, which is no dependency"
)
def test_grpo(tmp_path: Any) -> None:
    """The real trainer takes it, and its model is trained."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = demo.model().float()
    before = model.lm_head.weight.detach().clone()
    config = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=NEW,
        max_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    data = Dataset.from_dict({"prompt": demo.prompts()[:2]})
    trainer = GRPOTrainer(
        model=model,
        args=config,
        train_dataset=data,
        reward_funcs=lambda completions, **_: [float(len(each) % 5) for each in completions],
        processing_class=demo.tokenizer(),
        rollout_func=rollout_func,
    )
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before)
    drop_engine(model)
