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
import importlib
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
EXPERIMENTAL = {"OnlineDPO": "online_dpo", "SDFT": "sdft", "SDPO": "sdpo", "GKD": "gkd", "GOLD": "gold"}
"""Trainers outside of TRL's own front door, and where they are."""
WITHOUT_FIELD = ("GKD", "GOLD")
"""Their configs have no cache_implementation; the trainer's generation_config takes the word."""
REWARDED = ("GRPO", "RLOO", "OnlineDPO", "SDPO")
GROUPED = ("GRPO", "RLOO", "SDPO")
"""They repeat prompts themselves."""
CHAT = "{% for each in messages %}{{ each.content }}{% endfor %}"


class Case(NamedTuple):
    """A way of training."""

    options: dict[str, Any]
    trainer: str = "GRPO"
    lora: dict[str, Any] | None = None
    prepare: Callable[[Any], None] = lambda model: None
    paged: bool = True
    """Whether rollouts run on pages; else there must be one warning with the reason."""


def teacher() -> Any:
    """A model whose answers are others: the tiny one with noise in its weights."""
    model = demo.model().float()
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=chance)
    return model.eval()


def drop_attention(model: Any) -> None:
    """Let attention drop some of what it reads, in training mode."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1


CASES = {
    "grpo": Case({}),
    "rloo": Case({}, trainer="RLOO"),
    "distillation": Case({}, trainer="Distillation"),
    "online-dpo": Case({}, trainer="OnlineDPO"),
    "sdft": Case({}, trainer="SDFT"),
    "sdpo": Case({}, trainer="SDPO"),
    "gkd": Case({"lmbda": 1.0}, trainer="GKD"),
    "gold": Case({"lmbda": 1.0}, trainer="GOLD"),
    "checkpointing": Case({"gradient_checkpointing": True}),
    "peft": Case({"beta": 0.04}, lora={}),  # beta: the reference is the model with its adapter disabled
    "peft-dropout": Case({}, lora={"lora_dropout": 0.1}, paged=False),
    "dropout": Case({}, prepare=drop_attention, paged=False),
    "reference": Case({"beta": 0.04, "num_iterations": 2}),
    "autocast": Case({"bf16": True}),
}


def classes(trainer: str) -> tuple[Any, Any]:
    """The config and the trainer of a name."""
    place = trl
    if trainer in EXPERIMENTAL:
        place = importlib.import_module(f"trl.experimental.{EXPERIMENTAL[trainer]}")
    return getattr(place, f"{trainer}Config"), getattr(place, f"{trainer}Trainer")


def options_of(trainer: str, word: str | None) -> dict[str, Any]:
    """How the trainers name what a rollout is."""
    length = "max_new_tokens" if trainer in ("OnlineDPO", "GKD") else "max_completion_length"
    options: dict[str, Any] = {length: NEW}
    if trainer not in WITHOUT_FIELD:
        options["cache_implementation"] = word
    if trainer in GROUPED:
        options["num_generations"] = SAMPLES
    return options


def data_of(trainer: str) -> Any:
    """Prompts, or for trainers that may also learn from answers conversations."""
    prompts = demo.prompts()[:12]
    if trainer not in GROUPED:
        prompts = prompts * SAMPLES
    if trainer not in WITHOUT_FIELD:
        hints = {} if trainer != "SDFT" else {"privileged_context": prompts[::-1]}
        return Dataset.from_dict({"prompt": prompts, **hints})
    turns = [
        [{"role": "user", "content": each}, {"role": "assistant", "content": " The end."}] for each in prompts
    ]
    return Dataset.from_dict({"messages": turns})


def note_answers(model: Any, seen: list[Any]) -> None:
    """Enter what every generate() of the model answers."""
    generate = type(model).generate

    def noting(*args: Any, **kwargs: Any) -> Any:
        answer = generate(model, *args, **kwargs)
        rows = getattr(answer, "sequences", answer)
        seen.append(rows.tolist())
        return answer

    model.generate = noting


def train(case: Case, word: str | None, steps: int) -> tuple[list[Any], Any, float]:
    """The completions of every step, the model, and the seconds of all rollouts and steps."""
    torch.manual_seed(0)
    model, tokenizer = demo.model().float(), demo.tokenizer()
    case.prepare(model)
    if case.trainer in WITHOUT_FIELD:
        tokenizer.chat_template = CHAT
    seen: list[Any] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [len(set(each)) / NEW for each in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        given = {
            "per_device_train_batch_size": PROMPTS * SAMPLES,
            "max_steps": steps,
            "learning_rate": 1e-3,
            "gradient_checkpointing": False,
            "bf16": False,
            **options_of(case.trainer, word),
            **case.options,
        }
        quiet = {"report_to": [], "save_strategy": "no", "logging_steps": 10**6, "disable_tqdm": True}
        config_class, trainer_class = classes(case.trainer)
        config = config_class(folder, use_cpu=True, seed=0, **quiet, **given)
        lora = None
        if case.lora is not None:
            from peft import LoraConfig

            lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **case.lora)
        source: dict[str, Any] = {"reward_funcs": reward} if case.trainer in REWARDED else {}
        if case.trainer not in (*REWARDED, "SDFT"):
            source["teacher_model"] = teacher()
        trainer = trainer_class(
            model=model,
            args=config,
            train_dataset=data_of(case.trainer),
            processing_class=tokenizer,
            peft_config=lora,
            **source,
        )
        if case.trainer in WITHOUT_FIELD:
            trainer.generation_config.cache_implementation = word
        note_answers(model, seen)
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
