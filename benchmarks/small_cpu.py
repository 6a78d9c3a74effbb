"""What pages and the engine cost a user of a small model on a CPU, where the host's own work is what is felt.

    OMP_NUM_THREADS=1 python benchmarks/small_cpu.py     # one thread; without the variable all that torch takes
    python benchmarks/small_cpu.py --sections start      # imports and first calls, each in a process of its own

The demo model generates `--new` tokens with stock generate(), with paged generate() and through the engine. Ours
and stock take turns, so a busy machine slows both alike.

stock, ours   milliseconds a call, medians of `--rounds` turns
ratio         the median over turns of ours divided by stock
work          the same ratio of processor time, which other processes disturb less
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from shapes import common_parser, report_of

from hf_paged import Engine, demo

Call = Callable[[], Any]
PROMPTS = 32
LENGTHS = range(6, 37, 5)
"""Tokens of the prompts of a batch, in turns."""

BEFORE = "import time; import torch, transformers; from transformers import LlamaForCausalLM"
FIRST = """
from hf_paged import Engine, demo
model, ids = demo.model(), torch.arange(3, 19)[None]
begin = time.perf_counter()
{call}
print(time.perf_counter() - begin)
"""
STARTS = {
    "import hf_paged": BEFORE
    + "\nbegin = time.perf_counter(); import hf_paged; print(time.perf_counter() - begin)",
    "stock generate()": BEFORE + FIRST.format(call="model.generate(ids, max_new_tokens=8)"),
    "paged generate()": BEFORE
    + FIRST.format(call="model.generate(ids, max_new_tokens=8, cache_implementation='paged')"),
    "Engine and its first answer": BEFORE
    + FIRST.format(call="Engine(model).generate([ids[0].tolist()], max_new_tokens=8, progress=False)"),
}
"""Programs that print the seconds of what they are named by; torch and transformers are there already."""


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """The prompts as one left-padded batch."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ),
    }


def compare(stock: Call, ours: Call, rounds: int) -> dict[str, float]:
    """Both in turns, `rounds` times behind two that warm up."""
    walls: dict[Call, list[float]] = {stock: [], ours: []}
    works: dict[Call, list[float]] = {stock: [], ours: []}
    for number in range(-2, rounds):
        for call in (stock, ours) if number % 2 else (ours, stock):
            wall, work = time.perf_counter(), time.process_time()
            call()
            if number >= 0:
                walls[call].append(time.perf_counter() - wall)
                works[call].append(time.process_time() - work)
    return {
        "stock": 1e3 * statistics.median(walls[stock]),
        "ours": 1e3 * statistics.median(walls[ours]),
        "ratio": statistics.median(
            mine / theirs for mine, theirs in zip(walls[ours], walls[stock], strict=True)
        ),
        "work": statistics.median(
            mine / theirs for mine, theirs in zip(works[ours], works[stock], strict=True)
        ),
    }


def calls(report: Any, options: argparse.Namespace) -> None:
    """Generating with a warm model."""
    model: Any = demo.model()
    model.generation_config.eos_token_id = None
    tokenizer = demo.tokenizer()
    ids = tokenizer(demo.prompts()[0], return_tensors="pt")["input_ids"]
    story = cycle(tokenizer(" ".join(demo.prompts()))["input_ids"])
    batch = [list(islice(story, length)) for length in islice(cycle(LENGTHS), PROMPTS)]
    asked = {"max_new_tokens": options.new, "do_sample": False}
    report.table(
        "calls", f"{options.new} new tokens, medians of {options.rounds} turns", what=("ours", ""), stock=("stock, ms", ".1f"),
        ours=("ours, ms", ".1f"), ratio=("ratio", ".3f"), work=("work", ".3f"),
    )  # fmt: skip
    alone = partial(model.generate, input_ids=ids, attention_mask=torch.ones_like(ids), **asked)
    paged = partial(alone, cache_implementation="paged", cache_config={"kernels": options.kernels})
    report.row(what="paged generate(), one prompt", **compare(alone, paged, options.rounds))
    with Engine(model, kernels=options.kernels) as engine:
        one = partial(engine.generate, [ids[0].tolist()], progress=False, **asked)
        report.row(what="engine, one prompt", **compare(alone, one, options.rounds))
    with Engine(model, max_batch_sequences=PROMPTS, kernels=options.kernels) as engine:
        together = partial(model.generate, **padded(batch), **asked)
        many = partial(engine.generate, batch, progress=False, **asked)
        report.row(what=f"engine, {PROMPTS} prompts", **compare(together, many, options.rounds))


def start(report: Any, options: argparse.Namespace) -> None:
    """Importing, and the first call of a process."""
    report.table("start", "in a fresh process", what=("what", ""), seconds=("seconds", ".3f"))
    for name, program in STARTS.items():
        seconds = [
            float(
                subprocess.run(
                    [sys.executable, "-c", program], check=True, capture_output=True, text=True
                ).stdout
            )
            for _ in range(5)
        ]
        report.row(what=name, seconds=statistics.median(seconds))


SECTIONS = {"calls": calls, "start": start}


def main() -> None:
    parser = common_parser(__doc__, SECTIONS)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kernels", default="auto")
    options = parser.parse_args()
    options.shape, options.device = "demo", "cpu"
    report = report_of(options, kernels=options.kernels, new=options.new)
    report.run(
        {name: partial(section, options=options) for name, section in SECTIONS.items()},
        options.sections,
        report,
    )


if __name__ == "__main__":
    main()
