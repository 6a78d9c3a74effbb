"""A callback for transformers' trainers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from .model.offloaded import divided
from .model.ranks.tensor_parallel import mesh_of
from .model.training import evaluating


class SampleCallback(TrainerCallback):
    """Shows what the model answers to some prompts while it is trained.

    `Trainer(..., callbacks=[SampleCallback(["Once upon a time"], every=100)])`. The answers come from paged
    generate() on the model in training, in eval mode and without gradients; draws leave the trainer's random
    state as it was.
    """

    def __init__(
        self, prompts: Sequence[Any], every: int = 100, *, tokenizer: Any = None, **generate_keywords: Any
    ) -> None:
        """prompts: texts, or chats. every: so many steps. tokenizer: if the trainer has none
        (processing_class). generate_keywords: as generate() takes them; 64 greedy tokens without any.
        """
        if not prompts or isinstance(prompts, str):
            raise ValueError(f"prompts is {prompts!r}; give a list of texts or chats, one at least")
        if every < 1:
            raise ValueError(f"every is {every}; give a number of steps, 1 or more")
        self.prompts = list(prompts)
        self.every = every
        self.tokenizer = tokenizer
        self.options = {"max_new_tokens": 64, "do_sample": False} | generate_keywords
        self.samples: list[tuple[int, list[str]]] = []
        """The steps at which answers were taken, and the answers."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Sample at every so many steps, on the first process, or all if each has a part of the model."""
        if state.global_step % self.every:
            return
        model = given["model"]
        together = _is_shared(model)
        if not (together or state.is_world_process_zero):
            return
        tokenizer = self.tokenizer or given.get("processing_class")
        if tokenizer is None:
            raise ValueError(
                "SampleCallback needs a tokenizer; give it one, or the trainer a processing_class"
            )
        options = self.options | ({"synced_gpus": True} if together else {})  # some may draw longer answers
        answers = self._answers(model, tokenizer, {"cache_implementation": "paged"} | options)
        if not state.is_world_process_zero:
            return
        self.samples.append((state.global_step, answers))
        for prompt, answer in zip(self.prompts, answers, strict=True):
            print(f"step {state.global_step}  {prompt!r} -> {answer!r}", flush=True)

    def _answers(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> list[str]:
        devices = [model.device] if model.device.type == "cuda" else []
        with evaluating(model), torch.random.fork_rng(devices), torch.no_grad(), _outermost_weights(model):
            return [self._answer(model, tokenizer, prompt, options) for prompt in self.prompts]

    def _answer(self, model: Any, tokenizer: Any, prompt: Any, options: dict[str, Any]) -> str:
        if isinstance(prompt, str):
            inputs = tokenizer(prompt, return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        ids = inputs["input_ids"].to(model.device)
        mask = inputs["attention_mask"].to(model.device)
        answer = model.generate(input_ids=ids, attention_mask=mask, **options)
        text: str = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
        return text


def _is_shared(model: Any) -> bool:
    """True if processes must compute the model together, as each has a part of its weights."""
    by_fsdp = divided(map(type, model.modules()))
    return by_fsdp or mesh_of(model) is not None or bool(is_deepspeed_zero3_enabled())


def _outermost_weights(model: Any) -> AbstractContextManager[None]:
    """Where the outermost module is FSDP's first version: its own weights, which only its forward gathers."""
    if "FullyShardedDataParallel" not in {kind.__name__ for kind in type(model).__mro__}:
        return nullcontext()
    gathered: AbstractContextManager[None] = model.summon_full_params(model, recurse=False, writeback=False)
    return gathered
