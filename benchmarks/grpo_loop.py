"""An iteration of GRPO in torch and peft alone, for machines without TRL (benchmarks/grpo.py --loop plain).

rollout  each prompt as so many equal rows in one sampled generate(), in training mode without gradients
rewards  the distinct tokens of a completion; advantage: (reward - mean of the prompt's) / (deviation + 1e-4)
loss     micro-batches of one forward over prompt and completion, logits of the completion alone, and one backward of
         the clipped objective; a batch is used once, so the old log-probabilities are the forward's own and no
         reference model is computed (TRL's defaults, beta=0)
step     gradients clipped to 1, AdamW on the adapter

TRL computes the same forwards and backwards, and besides them the entropy of each position.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from shapes import build

import hf_paged

CLIP = 0.2


class Clock:
    """Seconds of each iteration, and of its rollout and its optimizer step."""

    def __init__(self) -> None:
        self.iterations: list[float] = []
        self.rollouts: list[float] = []
        self.steps: list[float] = []


def now() -> float:
    """The time when the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def lora() -> LoraConfig:
    return LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


class PlainLoop:
    """A model with an adapter, its optimizer, and how rollouts are sampled."""

    def __init__(self, options: argparse.Namespace, word: dict[str, Any]) -> None:
        self.options, self.word = options, word
        base = build(options.shape, options.device, getattr(torch, options.dtype), **options.changes)
        base.generation_config.pad_token_id = base.generation_config.eos_token_id = 0
        self.model: Any = get_peft_model(base, lora()).train()
        self.learned = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.learned, lr=1e-5)
        self.clock = Clock()
        self.random = torch.Generator(options.device).manual_seed(1)

    def iterate(self) -> None:
        """One iteration on new prompts."""
        begin = now()
        rows = self.rollout()
        sampled = now()
        advantages = self.advantages(rows[:, self.options.tokens[0] :])
        for part, own in zip(
            rows.split(self.options.micro), advantages.split(self.options.micro), strict=True
        ):
            (self.loss(part, own) * len(part) / len(rows)).backward()
        computed = now()
        torch.nn.utils.clip_grad_norm_(self.learned, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        end = now()
        self.clock.iterations.append(end - begin)
        self.clock.rollouts.append(sampled - begin)
        self.clock.steps.append(end - computed)

    def rollout(self) -> torch.Tensor:
        """Prompts and completions [prompts * samples, prompt + new]."""
        options = self.options
        prompt, new = options.tokens
        high = self.model.config.vocab_size
        shape = (options.prompts, prompt)
        ids = torch.randint(10, high, shape, device=options.device, generator=self.random)
        ids = ids.repeat_interleave(options.samples, 0)
        with torch.no_grad():
            answer: torch.Tensor = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                max_new_tokens=new, min_new_tokens=new, disable_compile=True, **self.word,
            )  # fmt: skip
        return answer

    def advantages(self, completions: torch.Tensor) -> torch.Tensor:
        """The advantage of each row [rows], within its prompt's."""
        rewards = torch.tensor([float(len(set(row))) for row in completions.tolist()])
        own = rewards.view(self.options.prompts, self.options.samples)
        found = (own - own.mean(1, keepdim=True)) / (own.std(1, keepdim=True) + 1e-4)
        return found.view(-1).to(completions.device)

    def loss(self, rows: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """The clipped objective of some rows."""
        prompt, new = self.options.tokens
        half = self.options.dtype != "float32"
        with torch.autocast(rows.device.type, getattr(torch, self.options.dtype), enabled=half):
            logits = self.model(
                input_ids=rows, attention_mask=torch.ones_like(rows), use_cache=False, logits_to_keep=new + 1
            ).logits[:, :-1]
        chosen = logits.float().log_softmax(-1).gather(-1, rows[:, prompt:, None])[..., 0]
        ratio = (chosen - chosen.detach()).exp()
        weights = advantages[:, None]
        return -torch.minimum(ratio * weights, ratio.clamp(1 - CLIP, 1 + CLIP) * weights).mean()


def trained(options: argparse.Namespace, word: dict[str, Any]) -> Clock:
    """A few iterations with rollouts by generate() with these words."""
    loop = PlainLoop(options, word)
    for _ in range(options.iterations):
        loop.iterate()
    hf_paged.release(loop.model)
    return loop.clock
