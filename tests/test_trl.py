"""hf_paged.trl: rollouts of a trainer's own model, with the log-probabilities of the sampler (C24)."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import lora
from invariance import compiles, model_of
from peft import get_peft_model
from releases import NEEDS_SLOTS
from transformers import (
    GenerationConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_paged import batch_invariant, demo, replay_routing
from hf_paged.continuous.engines import drop_engine, engine_for
from hf_paged.model.registry import base_model
from hf_paged.scheduling import Infeasible
from hf_paged.trl import LOGPROBS, add_positions, rollout_func

NEW = 6


@pytest.fixture
def trainer() -> Any:
    """The attributes of a trainer that rollout_func reads."""
    model = demo.model().float().train()
    accelerator = SimpleNamespace(
        state=SimpleNamespace(), unwrap_model=lambda model: model, autocast=lambda options: nullcontext()
    )
    config = GenerationConfig(
        max_new_tokens=NEW,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        disable_compile=True,
        cache_implementation="paged",
    )
    yield SimpleNamespace(
        args=SimpleNamespace(),
        accelerator=accelerator,
        model=model,
        generation_config=config,
        processing_class=demo.tokenizer(),
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


def test_greedy_completions_of_a_prompt_are_alike(trainer: Any) -> None:
    first, second = demo.prompts()[:2]
    trainer.generation_config = GenerationConfig(max_new_tokens=NEW, do_sample=False)
    found = rollout_func([first, second, first], trainer)
    for text, new in zip([first, second, first], found["completion_ids"], strict=True):
        ids = torch.tensor([trainer.processing_class(text)["input_ids"]])
        right = trainer.model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        assert new == right.tolist()


def test_a_part_in_another_mode_keeps_it(trainer: Any) -> None:
    """A trainer's frozen parts may be in eval mode while the rest trains."""
    frozen = trainer.model.model.layers[0].eval()
    rollout_func(demo.prompts()[:1], trainer)
    assert trainer.model.training
    assert not any(module.training for module in frozen.modules())


def test_nothing_is_left_of_a_rollout_that_failed(trainer: Any) -> None:
    """C34: the engine stays with the model, and would compute the other prompts under weights that change."""
    few = {"num_blocks": 10, "block_size": 4, "max_batch_sequences": 1, "max_batch_tokens": 64}
    trainer.processing_class = lambda text: {"input_ids": [list(map(int, each.split())) for each in text]}
    texts = ["7 8 9", " ".join(["9"] * 60), "10 11 12"]
    with pytest.raises(Infeasible):
        rollout_func(texts, trainer, **few)
    engine = engine_for(trainer.model, few, None)
    assert engine.stats()["waiting"] == engine.stats()["running"] == 0
    assert _worst(trainer, rollout_func(texts[:1], trainer, **few)) < 1e-4


def test_turns_behind_a_tools_answer(trainer: Any) -> None:
    """TRL asks for them itself, wants their log-probabilities, and adds what the tool said to a row's lists."""
    trainer.tools = [print]
    trainer.generation_config = GenerationConfig(max_new_tokens=NEW, do_sample=False)
    found = rollout_func(demo.prompts()[:1] * 2, trainer)
    assert found["completion_ids"][0] is not found["completion_ids"][1]
    assert found["logprobs"][0] is not found["logprobs"][1]
    longer = [found["prompt_ids"][0] + found["completion_ids"][0] + [7, 8]]
    trainer.generation_config = GenerationConfig(max_new_tokens=NEW, do_sample=True, temperature=0.7, top_k=0)
    turn = vars(trainer)["_generate_single_turn"]
    new, logprobs = turn(longer * 3, None, {}, num_generations=1)
    assert _worst(trainer, {"prompt_ids": longer * 3, "completion_ids": new, "logprobs": logprobs}) < 1e-4
    longest = trainer.model.config.max_position_embeddings
    new, _ = turn([[7] * (longest - 2)], None, {}, num_generations=1)
    assert len(new[0]) <= 2
    with pytest.raises(ValueError, match="a tool has answered with pictures"):
        turn(longer, ["a picture"], {}, num_generations=1)


def test_tools_of_each_prompts_environment(trainer: Any) -> None:
    """TRL shows a prompt the tools of its own environment, where there are several."""
    trainer.processing_class.chat_template = "{{ tools | length if tools else 0 }} {{ messages[0].content }}"
    trainer.environment_factories = {"a": None, "b": None}
    tools = {"a": [], "b": [{"type": "function"}]}
    vars(trainer).update(_env_tools=tools, _batch_environments=["b", "a"], tools=tools["b"])
    chats = [[{"role": "user", "content": "The fox"}]] * 2
    render = partial(trainer.processing_class.apply_chat_template, add_generation_prompt=True)
    right = [render(chats[0], tools=tools[name] or None, return_dict=False) for name in "ba"]
    assert right[0] != right[1]
    assert rollout_func(chats, trainer)["prompt_ids"] == right


def test_new_weights_are_seen(trainer: Any) -> None:
    rows = demo.prompts()[:2]
    rollout_func(rows, trainer)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(0.9)
    assert _worst(trainer, rollout_func(rows, trainer)) < 1e-4


@compiles
@pytest.mark.parametrize("name", ["llama", "peft", "peft under autocast", "gpt2"])
def test_the_bits_of_a_forward_padded_on_the_left(trainer: Any, name: str) -> None:
    """C44: a trainer's batch without positions, in batch-invariant arithmetic."""
    trainer.ref_model = None
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled="autocast" in name)
    trainer.accelerator.autocast = lambda options: autocast(cache_enabled=options.cache_enabled)
    if name == "gpt2":  # positions that are learned
        trainer.model = model_of("gpt2").train()
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    if "peft" in name:
        trainer.ref_model = demo.model()
        trainer.model = get_peft_model(trainer.model, lora(init_lora_weights=False)).train()
    rows = [[7, 8, 9], [10, 11, 12, 13, 14, 15, 16], [7, 8, 9]]
    trainer.processing_class = lambda text: {"input_ids": [list(map(int, each.split())) for each in text]}
    texts = [" ".join(map(str, row)) for row in rows]
    for _ in range(2):
        found = rollout_func(texts, trainer, batch_invariant=True)
    ids = torch.zeros(3, 7 + NEW, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt, new in zip(range(3), rows, found["completion_ids"], strict=True):
        ids[row, 7 - len(prompt) : 7 + len(new)] = torch.tensor(prompt + new)
        mask[row, 7 - len(prompt) : 7 + len(new)] = 1
    with batch_invariant():
        with autocast():
            logits = trainer.model(input_ids=ids, attention_mask=mask).logits.float()
        scores = (logits / 0.7).log_softmax(-1)
    for row, new, own in zip(range(3), found["completion_ids"], found["logprobs"], strict=True):
        assert own == [scores[row, 6 + place, token].item() for place, token in enumerate(new)]
    for model in filter(None, (trainer.model, trainer.ref_model)):
        hooks = list(model._forward_pre_hooks.values())
        assert hooks.count(add_positions) == 1
        pickle.dumps(hooks)
    drop_engine(base_model(trainer.model))


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


def mixture() -> Any:
    """A small mixture of experts with the demo's vocabulary."""
    torch.manual_seed(5)
    size = len(demo.tokenizer())
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_experts=8,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=size,
        max_position_embeddings=512, norm_topk_prob=True, eos_token_id=None, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).train()


def logprobs_of(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, batch_size: int) -> Any:
    """As trainers compute them, in parts of a batch."""
    parts = [
        model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
        for ids, mask in zip(input_ids.split(batch_size), attention_mask.split(batch_size), strict=True)
    ]
    scores = torch.cat(parts)[:, :-1]
    return scores.gather(-1, input_ids[:, 1:, None])[..., 0]


def padded(found: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded on the left and completions on the right, as in a trainer's batch."""
    before, behind = (max(map(len, found[name])) for name in ("prompt_ids", "completion_ids"))
    ids = torch.zeros(len(found["prompt_ids"]), before + behind, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, new) in enumerate(zip(found["prompt_ids"], found["completion_ids"], strict=True)):
        here = slice(before - len(prompt), before + len(new))
        ids[row, here], mask[row, here] = torch.tensor(prompt + new), 1
    return ids, mask


def test_forwards_take_the_experts_of_the_rollout(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the routers have changed since; not in eval mode, and not of rows that no rollout has."""
    trainer.model = mixture()
    setattr(trainer, LOGPROBS, logprobs_of)
    rollout = partial(rollout_func, replay_routing=True)
    texts = [*demo.prompts()[:2], demo.prompts()[0]]
    found = rollout(texts, trainer)
    ids, mask = padded(found)
    compute = getattr(trainer, LOGPROBS)
    routing = []
    engine = engine_for(trainer.model, {}, None)
    for prompt, new in zip(found["prompt_ids"], found["completion_ids"], strict=True):
        given = engine.submit(prompt + new, max_new_tokens=1, return_routing=True).result()
        routing.append(given.sequences[0].routing[: len(prompt + new) - 1])
    with torch.no_grad():
        for name, each in trainer.model.named_parameters():
            if name.endswith("gate.weight"):
                each.neg_()
    seen = mask[:, 1:].bool() & mask[:, :-1].bool()
    free = logprobs_of(trainer.model, ids, mask, 2)
    replayed = compute(trainer.model, input_ids=ids, attention_mask=mask, batch_size=2)
    for row, own in enumerate(routing):
        real = mask[row].bool()
        with replay_routing(own):
            wanted = logprobs_of(trainer.model, ids[row, real][None], mask[row, real][None], 1)
        assert torch.allclose(replayed[row][seen[row]], wanted[0], atol=1e-5)
    assert (free - replayed)[seen].abs().max() > 1e-2
    replayed[seen].sum().backward()  # behind the call
    assert "forward" not in trainer.model.__dict__
    assert not caplog.records
    other = ids.clone()
    other[0, -2] += 1  # one row is another
    mixed = compute(trainer.model, input_ids=other, attention_mask=mask, batch_size=3)
    assert torch.equal(mixed[1:][seen[1:]], compute(trainer.model, ids, mask, 3)[1:][seen[1:]])
    assert "1 of 3 rows in the trainer's forward" in caplog.text
    trainer.model.eval()
    assert torch.equal(compute(trainer.model, ids, mask, 2), free)
    assert rollout(texts[:1], trainer)["completion_ids"]  # an evaluation forgets nothing
    trainer.model.train()
    assert torch.equal(compute(trainer.model, ids, mask, 2), replayed)


def test_routing_that_no_forward_could_replay_is_refused(trainer: Any) -> None:
    with pytest.raises(ValueError, match="SimpleNamespace has no _get_per_token"):
        rollout_func(demo.prompts()[:1], trainer, replay_routing=True)
    setattr(trainer, LOGPROBS, logprobs_of)
    trainer.args.use_liger_kernel = True
    with pytest.raises(ValueError, match="leave one of them out"):
        rollout_func(demo.prompts()[:1], trainer, replay_routing=True)
    trainer.args.use_liger_kernel = False
    with pytest.raises(ValueError, match="experts"):
        rollout_func(demo.prompts()[:1], trainer, replay_routing=True)


needs_trl = pytest.mark.skipif(
    find_spec("trl") is None or find_spec("datasets") is None, reason="needs TRL, which is no dependency"
)


def _train(
    folder: Any,
    kind: str,
    rollout: Any,
    note: Any = None,
    adapter: Any = None,
    model: Any = None,
    **options: Any,
) -> None:
    """Two steps of TRL's trainer, whose model changes. note: gets each loss's inputs and log-probabilities."""
    import trl
    from datasets import Dataset

    model = demo.model().float() if model is None else model
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    given = {"bf16": False, **options}
    config = getattr(trl, f"{kind}Config")(
        str(folder),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=NEW,
        max_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        **given,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": demo.prompts()[:2]}),
        reward_funcs=lambda completions, **_: [float(len(each) % 5) for each in completions],
        processing_class=demo.tokenizer(),
        rollout_func=rollout,
        peft_config=adapter,
    )
    if note is not None:
        compute, inputs_of = trainer._get_per_token_logps_and_entropies, trainer._prepare_inputs

        def computing(*args: Any, **kwargs: Any) -> Any:
            answer = compute(*args, **kwargs)
            note.append(answer[0].detach())
            return answer

        def preparing(batch: Any) -> Any:
            inputs = inputs_of(batch)
            note.append(inputs)
            return inputs

        trainer._get_per_token_logps_and_entropies, trainer._prepare_inputs = computing, preparing
    if adapter is not None:
        before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, each in trainer.model.named_parameters() if not torch.equal(each, before[name])}
    assert changed == {name for name in before if adapter is None or "lora" in name}
    drop_engine(trainer.model)


@needs_trl
def test_grpo(tmp_path: Any) -> None:
    """The real trainer takes it, and its model is trained."""
    _train(tmp_path, "GRPO", rollout_func)


def hybrid() -> Any:
    """A small Qwen3.5 with the demo's vocabulary: three of its four layers keep a recurrent state."""
    torch.manual_seed(5)
    config = Qwen3_5TextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, vocab_size=len(demo.tokenizer()), max_position_embeddings=512,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config).train()


@NEEDS_SLOTS
@needs_trl
def test_grpo_of_a_hybrid(tmp_path: Any) -> None:
    """By the one word its weights become those that they become without; and with rollouts of the engine."""
    models = [hybrid(), hybrid()]
    for model, word in zip(models, (None, "paged"), strict=True):
        _train(tmp_path, "GRPO", None, model=model, temperature=1.0, cache_implementation=word)
    for stock, own in zip(*[model.parameters() for model in models], strict=True):
        assert torch.allclose(stock, own, atol=1e-6)
    _train(tmp_path, "GRPO", rollout_func, model=hybrid(), temperature=1.0)


@needs_trl
def test_grpo_of_a_mixture(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every forward of the loss finds its rows, those that gradient checkpointing computes again too."""
    replayed = []

    def replaying(routing: torch.Tensor) -> Any:
        replayed.append(routing)
        return replay_routing(routing)

    monkeypatch.setattr("hf_paged.trl.replaying", replaying)
    rollout = partial(rollout_func, replay_routing=True)
    _train(tmp_path, "GRPO", rollout, model=mixture(), temperature=1.0)
    assert len(replayed) >= 2
    assert all(len(each) == 4 and (each >= 0).any(2).any(2).any(1).all() for each in replayed)
    assert "choose experts anew" not in caplog.text


@pytest.mark.parametrize("adapted", [False, True])
def test_a_head_that_is_cast_to_float32(trainer: Any, adapted: bool) -> None:
    """TRL's loss computes it outside of autocast, so the sampler does; it is wrapped once."""
    trainer.args.cast_lm_head_to_fp32 = True
    trainer.accelerator.autocast = lambda options: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    head = trainer.model.lm_head
    seen = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(torch.nn.functional.linear(hidden.float(), head.weight.float()))
        return seen[-1]

    head.forward = forward
    if adapted:
        trainer.model = get_peft_model(trainer.model, lora())
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            rollout_func(demo.prompts()[:1], trainer)
    assert {each.dtype for each in seen} == {torch.float32}
    assert head.forward.__wrapped__ is forward
    drop_engine(trainer.model)


@compiles
@needs_trl
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("temperature", "autocast"), [(1.0, False), (0.7, True)])
def test_trainers_and_samplers_numbers_are_the_same_bits(
    tmp_path: Any, temperature: float, autocast: bool, adapted: bool
) -> None:
    """C44: of prompts of several lengths, in TRL's own loss."""
    noted: list[Any] = []
    options = {"temperature": temperature, "beta": 0.04, "bf16": autocast}
    if adapted:
        options["adapter"] = lora(task_type="CAUSAL_LM")
    else:  # TRL cannot cast a head that peft has wrapped and that shares its weight
        options["cast_lm_head_to_fp32"] = autocast
    with batch_invariant():
        rollout = partial(rollout_func, batch_invariant=True)
        _train(tmp_path, "GRPO", rollout, noted, **options)
    compared = 0
    inputs = None
    for each in noted:
        if isinstance(each, dict):
            inputs = each
            assert len(set(inputs["prompt_mask"].sum(-1).tolist())) > 1
        elif inputs is not None and torch.is_tensor(each) and each.shape == inputs["completion_mask"].shape:
            seen = inputs["completion_mask"].bool()
            compared += torch.equal(each[seen], inputs["sampling_per_token_logps"][seen])
    assert compared == 2
