#!/usr/bin/env python3
"""Train with TRL on paged rollouts and on stock ones, and compare the completions step by step.

    pip install trl
    python scripts/check_trl.py                      # every case, 50 steps each, a few minutes on a CPU
    python scripts/check_trl.py --steps 5 grpo peft  # some of them

In float32 on a CPU every completion of every step must be the same: the same draws from the same weights, so a
stale block, graph or adapter would show at the step after it. The model is the tiny Llama that comes with
hf_paged; it is trained for real, with a learning rate that changes its answers at every step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import hf_paged
from hf_paged import demo

try:
    import trl
    from datasets import Dataset
except ImportError as error:
    sys.exit(f"this needs TRL ({error}); pip install trl")

PROMPTS, SAMPLES, NEW = 4, 4, 24


class Case(NamedTuple):
    """A way of training."""

    options: dict[str, Any]
    trainer: str = "GRPO"
    lora: dict[str, Any] | None = None
    prepare: Callable[[Any], None] = lambda model: None
    paged: bool = True
    """Whether rollouts run on pages; else there must be one warning with the reason."""


def drop_attention(model: Any) -> None:
    """Let attention drop some of what it reads, in training mode."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1


CASES = {
    "grpo": Case({}),
    "rloo": Case({}, trainer="RLOO"),
    "checkpointing": Case({"gradient_checkpointing": True}),
    "peft": Case({"beta": 0.04}, lora={}),  # beta: the reference is the model with its adapter disabled
    "peft-dropout": Case({}, lora={"lora_dropout": 0.1}, paged=False),
    "dropout": Case({}, prepare=drop_attention, paged=False),
    "reference": Case({"beta": 0.04, "num_iterations": 2}),
    "autocast": Case({"bf16": True}),
}


def train(case: Case, word: str | None, steps: int) -> tuple[list[Any], Any, float]:
    """The completions of every step, the model, and the seconds of all rollouts and steps."""
    torch.manual_seed(0)
    model, tokenizer = demo.model().float(), demo.tokenizer()
    case.prepare(model)
    seen: list[Any] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append([list(map(int, each)) for each in completion_ids])
        return [len(set(each)) / NEW for each in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        given = {
            "per_device_train_batch_size": PROMPTS * SAMPLES,
            "num_generations": SAMPLES,
            "max_completion_length": NEW,
            "max_steps": steps,
            "learning_rate": 1e-3,
            "gradient_checkpointing": False,
            "bf16": False,
            "cache_implementation": word,
            **case.options,
        }
        quiet = {"report_to": [], "save_strategy": "no", "logging_steps": 10**6, "disable_tqdm": True}
        config = getattr(trl, f"{case.trainer}Config")(folder, use_cpu=True, seed=0, **quiet, **given)
        lora = None
        if case.lora is not None:
            from peft import LoraConfig

            lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **case.lora)
        trainer = getattr(trl, f"{case.trainer}Trainer")(
            model=model,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": demo.prompts()[:12]}),
            reward_funcs=reward,
            processing_class=tokenizer,
            peft_config=lora,
        )
        begin = time.perf_counter()
        trainer.train()
        return seen, model, time.perf_counter() - begin


def check(name: str, case: Case, steps: int) -> bool:
    """Whether both ways of training sampled the same, on pages if they can be; prints a row."""
    stock, _, before = train(case, None, steps)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", hf_paged.FallbackWarning)
        paged, model, seconds = train(case, "paged", steps)
    texts = {str(each.message) for each in said if each.category is hf_paged.FallbackWarning}
    equal = sum(one == other for one, other in zip(stock, paged, strict=True))
    distinct = len({str(each) for each in stock})
    layers = set(hf_paged.stats(model).layers)
    ran = layers == {"paged"} and not texts if case.paged else len(texts) == 1
    good = (equal == len(stock) or "bf16" in case.options) and ran and distinct == len(stock)
    where = "pages" if not texts else "stock: " + texts.pop()[:90]
    print(
        f"{name:<14} {equal} of {len(stock)} steps equal, {distinct} distinct, stock {before:.1f} s, "
        f"paged {seconds:.1f} s, on {where}{'' if good else '   <-- wrong'}",
        flush=True,
    )
    return good


def main() -> int:
    """Run the cases that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="which cases; all if none is named")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    print(f"TRL {trl.__version__}, torch {torch.__version__}, {options.steps} steps")
    found = [check(name, CASES[name], options.steps) for name in options.cases or CASES]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
