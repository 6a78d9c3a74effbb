"""A whole iteration of GRPO, by how completions are sampled: seconds of rollout, loss and optimizer step.

    pip install trl
    python benchmarks/grpo.py --json results.jsonl      # on a GPU: 1B Llama shape, LoRA r16, bfloat16; two minutes
    OMP_NUM_THREADS=1 python benchmarks/grpo.py --shape tiny --prompts 2 --tokens 16 16 --iterations 2
    python benchmarks/grpo.py --shape qwen1b                       # a hybrid
    python benchmarks/grpo.py --shape qwen1b --loop plain          # without TRL: benchmarks/grpo_loop.py

stock         generate() as transformers has it
paged         the same by one word, cache_implementation="paged"
rollout_func  an engine on the trainer's model, with the sampler's log-probabilities (hf_paged.trl)

Every completion has all its tokens. The first iteration of a way, which compiles and captures, has a column of
its own; the others are medians of the later ones.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
from typing import Any

import torch
from grpo_loop import lora, now
from grpo_loop import trained as trained_plainly
from shapes import SHAPES, Report, build, common_parser, report_of
from tokenizer import tokenizer_of
from transformers import TrainerCallback

import hf_paged
from hf_paged.trl import rollout_func

BAR = 3.0
"""How many times faster than with stock generate() an iteration is to be."""
WAYS: dict[str, dict[str, Any]] = {
    "stock": {},
    "paged": {"cache_implementation": "paged"},
    "rollout_func": {"cache_implementation": "paged"},
}


class Clock(TrainerCallback):
    """Seconds of each iteration, and of the optimizer's step in it."""

    def __init__(self) -> None:
        self.iterations: list[float] = []
        self.steps: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = now()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._gradients = now()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.steps.append(now() - self._gradients)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.iterations.append(now() - self._begin)


def prompts_of(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """Texts of so many tokens."""
    chance = random.Random(0)
    words = sorted(token[1:] for token in tokenizer.get_vocab() if len(token) > 1 and token[1:].isalpha())
    return ["".join(" " + chance.choice(words) for _ in range(tokens)) for _ in range(count)]


def trained(options: argparse.Namespace, way: str) -> tuple[Clock, list[float], float]:
    """A few iterations of TRL's: their clock, the seconds of their rollouts, and the mean tokens of a completion."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rollouts: list[float] = []

    class TimedTrainer(GRPOTrainer):
        """GRPO that notes how long it samples."""

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            begin = now()
            answer = super()._generate(*args, **kwargs)
            rollouts.append(now() - begin)
            return answer

    on_gpu = torch.device(options.device).type == "cuda"
    prompt, new = options.tokens
    tokenizer = tokenizer_of(SHAPES[options.shape]["vocab_size"])
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    model = build(options.shape, options.device, getattr(torch, options.dtype), **options.changes)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = 0
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=model,
            args=GRPOConfig(
                folder,
                per_device_train_batch_size=options.micro,
                gradient_accumulation_steps=options.prompts * options.samples // options.micro,
                num_generations=options.samples,
                max_completion_length=new,
                generation_kwargs={"min_new_tokens": new},
                max_steps=options.iterations,
                learning_rate=1e-5,
                use_cpu=not on_gpu,
                bf16=on_gpu,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                **WAYS[way],
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts_of(tokenizer, options.prompts, prompt)}),
            reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
            processing_class=tokenizer,
            peft_config=lora(),
            rollout_func=rollout_func if way == "rollout_func" else None,
            callbacks=[clock],
        )
        trainer.train()
    hf_paged.release(trainer.model)
    logs = trainer.state.log_history
    length = statistics.mean(
        log["completions/mean_length"] for log in logs if "completions/mean_length" in log
    )
    return clock, rollouts, length


def grpo(options: argparse.Namespace, report: Report) -> None:
    """An iteration by each way."""
    prompt, new = options.tokens
    report.table(
        "grpo",
        f"GRPO ({options.loop}): {options.prompts} prompts x {options.samples} samples, {prompt} + {new} tokens, LoRA r16 on all linears, "
        f"micro-batches of {options.micro}, no checkpointing; medians of iterations behind the first",
        way=("rollouts", ""), iteration=("iteration, s", ".2f"), rollout=("rollout, s", ".2f"), loss=("loss, s", ".2f"),
        step=("step, s", ".3f"), faster=("times faster", ".2f"), rollout_faster=("the rollout", ".2f"),
        first=("first iteration, s", ".2f"), length=("mean completion", ".0f"),
    )  # fmt: skip
    stock: tuple[float, float] | None = None
    for way in options.ways:
        gc.collect()  # the model of the way before
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        with report.surviving(way):
            if options.loop == "plain":
                clock: Any = trained_plainly(options, WAYS[way])
                rollouts, length = clock.rollouts, new
            else:
                clock, rollouts, length = trained(options, way)
            medians = [statistics.median(each[1:]) for each in (clock.iterations, rollouts, clock.steps)]
            iteration, rollout, step = medians
            stock = stock or (iteration, rollout)
            report.row(
                way=way, iteration=iteration, rollout=rollout, loss=iteration - rollout - step, step=step,
                faster=stock[0] / iteration, rollout_faster=stock[1] / rollout, first=clock.iterations[0], length=length,
                iterations=clock.iterations, rollouts=rollouts,
            )  # fmt: skip
            if way == "paged" and options.shape == "llama1b":
                met = stock[0] / iteration >= BAR
                print("bar met" if met else f"BAR MISSED: {BAR} times faster", flush=True)
    report.end()


def main() -> None:
    parser = common_parser(__doc__)
    if torch.cuda.is_available():
        parser.set_defaults(shape="llama1b")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=[*WAYS], help="times faster: than the first"
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs=2, metavar=("PROMPT", "NEW"), default=[512, 512])
    parser.add_argument("--micro", type=int, default=8, help="rows of a micro-batch of the loss")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--loop", choices=["trl", "plain"], default="trl", help="plain: without TRL")
    options = parser.parse_args()
    options.changes = {"num_hidden_layers": options.layers} if options.layers else {}
    if options.loop == "plain":
        options.ways = [way for way in options.ways if way != "rollout_func"]  # that is TRL's
    grpo(options, report_of(options))


if __name__ == "__main__":
    main()
