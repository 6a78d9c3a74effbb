"""Log-probabilities of sampled tokens, by an engine in company and alone, and by a training-style forward."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from tiny import build, config_class

import hf_paged
import hf_paged_native
from hf_paged import Engine
from hf_paged.model.training import why_random

NEW = 5
compiles = pytest.mark.skipif(
    hf_paged_native.compiler() is None or torch.cuda.is_available(),
    reason="batch_invariant needs a C++ compiler, and is tested on a CPU",
)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model of a causal family."""
    return build("causal", config_class("causal", name)).to(dtype)


class Sampled(NamedTuple):
    """A sequence: how long its prompt is, and all of its tokens."""

    prompt: int
    tokens: list[int]


def prompts(vocabulary: int) -> list[list[int]]:
    """Prompts of several lengths, two of which begin alike."""
    chance = random.Random(1)
    made = [[chance.randrange(5, vocabulary) for _ in range(length)] for length in (3, 17, 30, 9)]
    return [*made, made[2][:20] + made[0]]


def engine_numbers(
    model: Any, vocabulary: int = 60, adapters: Sequence[Any] = (), given: Any = None, **options: Any
) -> tuple[list[Sampled], list[list[float]], list[list[float]]]:
    """Sequences that an engine sampled, and the log-probabilities of their tokens: drawn together in small
    steps with few blocks, and one by one. adapters: those of each prompt. given: a peft model whose adapters
    the engine is given.
    """
    small: dict[str, Any] = {"max_batch_tokens": 12, "num_blocks": 24, "block_size": 4}
    with Engine(model, batch_invariant=True, **{**small, **options}) as engine:
        rows = prompts(vocabulary)
        for name in () if given is None else given.peft_config:
            engine.add_adapter(name, given)

        def submit(row: int) -> Any:
            way = {"do_sample": row % 2 == 0, "seed": row, "pad_token_id": 0}
            way |= {"adapter": adapters[row]} if adapters else {}
            return engine.submit(rows[row], max_new_tokens=NEW, logprobs=True, **way)

        handles = [submit(row) for row in range(len(rows))]
        together = [handle.result() for handle in handles]
        alone = [submit(row).result() for row in range(len(rows))]
    found = []
    for outputs in (together, alone):
        for output in outputs:
            if output.error is not None:
                raise output.error
        found.append([[token.logprob for token in output.sequences[0].logprobs] for output in outputs])
    sequences = [
        Sampled(len(row), [*row, *output.sequences[0].token_ids])
        for row, output in zip(rows, together, strict=True)
    ]
    return sequences, found[0], found[1]


def trainer_numbers(model: Any, sequences: list[Sampled], side: str) -> list[list[float]]:
    """The log-probabilities of the same tokens by one forward without a cache over a padded batch, with gradients,
    in training mode if no dropout is active then.
    """
    width = max(len(each.tokens) for each in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long, device=model.device)
    mask = torch.zeros_like(ids)
    begins = [width - len(each.tokens) if side == "left" else 0 for each in sequences]
    for row, (begin, each) in enumerate(zip(begins, sequences, strict=True)):
        ids[row, begin : begin + len(each.tokens)] = torch.tensor(each.tokens, device=ids.device)
        mask[row, begin : begin + len(each.tokens)] = 1
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    training = model.training
    model.train(why_random(model.train()) is None)
    try:
        with hf_paged.batch_invariant():
            logprobs = model(**arguments).logits.float().log_softmax(-1)
    finally:
        model.train(training)
    return [
        [
            logprobs[row, begin + place - 1, each.tokens[place]].item()
            for place in range(each.prompt, len(each.tokens))
        ]
        for row, (begin, each) in enumerate(zip(begins, sequences, strict=True))
    ]


ADAPTERS = ("thin", None, "wide", ["native", "thin"], "native")
"""Of each prompt what it is sampled with, where the model is `adapted`."""


def adapted(model: Any) -> Any:
    """A peft model with LoRA adapters: "thin" of rank 1 and "wide" of rank 64 in float32, as peft makes them,
    and "native" of rank 12 in the model's own type.
    """
    import peft
    from adapters import lora

    dtype = model.dtype
    configs = {"thin": {"r": 1}, "wide": {"r": 64, "use_rslora": True}, "native": {"r": 12, "lora_alpha": 7}}
    torch.manual_seed(0)
    for name, options in configs.items():
        config = lora(target_modules="all-linear", **options)
        if name == "thin":
            model = peft.get_peft_model(model, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    for name, parameter in model.named_parameters():
        if ".native." in name:
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def adapters_numbers(
    model: Any, sequences: list[Sampled], adapters: Sequence[Any], side: str
) -> list[list[float]]:
    """`trainer_numbers` of a peft model: a forward for each of these adapters, with it active."""
    found: dict[int, list[float]] = {}
    for names in adapters:
        rows = [row for row, each in enumerate(adapters) if each == names]
        if names is not None:
            model.base_model.set_adapter(names)
        with model.disable_adapter() if names is None else nullcontext():
            numbers = trainer_numbers(model.get_base_model(), [sequences[row] for row in rows], side)
        found |= dict(zip(rows, numbers, strict=True))
    return [found[row] for row in range(len(sequences))]
