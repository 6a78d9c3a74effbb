"""A trainer samples from the model that it trains, in training mode: TRL's call path, without TRL."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from captures import counts, policy
from counted_rows import counted
from dropout import train_with_dropout
from families import BY_NAME, VOCABULARY, build
from tape import record
from transformers import GenerationConfig

import hf_paged
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS

STEPS = 8
SAMPLES = 4
PROMPT, NEW = 12, 8


def config_of(word: str | None) -> GenerationConfig:
    """As a trainer makes it: sampled, with the word among its fields, never compiled."""
    return GenerationConfig(
        max_new_tokens=NEW,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=[2],
        cache_implementation=word,
        disable_compile=True,
    )


def batch(step: int) -> dict[str, torch.Tensor]:
    """Two prompts of other lengths, padded left, each as so many adjacent rows."""
    ids = torch.randint(5, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {
        "input_ids": (ids * mask).repeat_interleave(SAMPLES, 0),
        "attention_mask": mask.repeat_interleave(SAMPLES, 0),
    }


def rollout(model: Any, step: int, word: str | None) -> torch.Tensor:
    """The samples at a step of the loop."""
    torch.manual_seed(step)
    with torch.no_grad():
        return model.generate(**batch(step), generation_config=config_of(word))[:, PROMPT:]


def train(model: Any, optimizer: Any, step: int, completions: torch.Tensor) -> None:
    """One step of REINFORCE: tokens of an even number are rewarded."""
    given = batch(step)
    ids = torch.cat([given["input_ids"], completions], 1)
    mask = torch.cat([given["attention_mask"], torch.ones_like(completions)], 1)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, PROMPT - 1 : -1]
    chosen = logits.log_softmax(-1).gather(-1, completions[..., None])[..., 0]
    rewards = (completions % 2 == 0).float().mean(1)
    loss = -((rewards - rewards.mean())[:, None] * chosen).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def plain(model: Any) -> Any:
    return model


def checkpointed(model: Any) -> Any:
    """As trainers do: on for the loss, off while they generate."""
    model.gradient_checkpointing_enable()
    return model


def adapted(model: Any, dropout: float = 0.0) -> Any:
    peft = pytest.importorskip("peft", reason="peft is an extra")
    config = peft.LoraConfig(
        r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def prepared(model: Any) -> Any:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is an extra")
    return accelerate.Accelerator(cpu=True).prepare(model)


@pytest.mark.parametrize(
    ("kind", "captured"),
    [*((kind, True) for kind in (plain, checkpointed, adapted, prepared)), (plain, False), (adapted, False)],
)
def test_a_training_loop_samples_what_stock_samples(
    kind: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C24: no stale block, captured step or adapter in any step; the model stays in training mode and prompts
    are computed once.
    """
    if captured:
        monkeypatch.setitem(RECORDERS, "cpu", record)
        policy(monkeypatch, least_steps=4)
    torch.manual_seed(0)
    stock = kind(build(BY_NAME["llama"])).train()
    paged = copy.deepcopy(stock)
    pairs = []
    for model in (stock, paged):
        trained = [each for each in model.parameters() if each.requires_grad]
        pairs.append((model, torch.optim.AdamW(trained, lr=2e-2)))
    base = paged.get_base_model() if kind is adapted else paged
    for step in range(STEPS):
        found = []
        for (model, optimizer), word in zip(pairs, (None, "paged"), strict=True):
            if kind is checkpointed:
                model.gradient_checkpointing_disable()
            with nullcontext([(2, PROMPT)]) if captured else counted(base) as seen:
                found.append(rollout(model, step, word))
            if kind is checkpointed:
                model.gradient_checkpointing_enable()
            train(model, optimizer, step, found[-1])
        assert seen[0] == (2, PROMPT)
        assert torch.equal(*found), f"step {step}"
        assert paged.training
    memory_of(base).check()
    if captured:
        assert counts(base)["captured"] <= 2  # the first of fewer rows, if one had ended by then
        assert counts(base)["replayed"] > (STEPS - 2) * (NEW - 1)


def test_the_reference_of_an_adapter(ids: torch.Tensor) -> None:
    """`disable_adapter()` gives the reference model, before and after the adapter has learned."""
    model = adapted(build(BY_NAME["llama"])).train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with model.disable_adapter():
        before = rollout(model, 0, "paged")
    for step in range(3):
        train(model, optimizer, step, rollout(model, step, "paged"))
    with model.disable_adapter():
        assert torch.equal(rollout(model, 0, "paged"), before)
        assert torch.equal(rollout(model, 0, None), before)
    assert not torch.equal(rollout(model, 0, "paged"), before)


@pytest.mark.parametrize("where", ["attention", "adapter"])
def test_active_dropout_gives_stocks_answer(where: str) -> None:
    """Stock's cache is used, with one warning that names the dropout."""
    model = build(BY_NAME["llama"])
    model = train_with_dropout(model) if where == "attention" else adapted(model, dropout=0.3).train()
    if where == "adapter":
        for name, each in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(each)
    expected = rollout(model, 0, None)
    with pytest.warns(
        hf_paged.FallbackWarning, match=r"training mode, where its \w+ has (attention_dropout|p)="
    ):
        assert torch.equal(rollout(model, 0, "paged"), expected)
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_paged.FallbackWarning)
        assert torch.equal(rollout(model, 0, "paged"), rollout(model, 0, None))


def test_parameters_that_move_between_calls() -> None:
    """As FSDP and DeepSpeed gather them: other storage for every rollout, and other values."""
    torch.manual_seed(0)
    stock = build(BY_NAME["llama"]).train()
    paged = copy.deepcopy(stock)
    gone = []
    for step in range(4):
        found = [rollout(stock, step, None), rollout(paged, step, "paged")]
        assert torch.equal(*found), f"step {step}"
        for model in (stock, paged):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                gone.append(parameter.data)
                parameter.data = parameter.data + 0.05 * noise
        for old in gone:
            old.fill_(float("nan"))  # what is read from there shows


def test_a_cast_in_place_rewrites_all_weights() -> None:
    """TRL casts the model to bfloat16 before its continuous batching."""
    model = build(BY_NAME["llama"]).train()
    rollout(model, 0, "paged")
    model.to(torch.bfloat16)
    assert torch.equal(rollout(model, 1, "paged"), rollout(model, 1, None))
