"""What each generation option costs: the same prompts through the engine, beside no option and beside stock's
padded batch.

    python benchmarks/options.py --json results.jsonl                   # on a GPU
    OMP_NUM_THREADS=1 python benchmarks/options.py --shape demo         # the demo model, on any CPU

engine    milliseconds for all prompts through `Engine.generate()`, the fastest of some runs
beside    the same over what no option costs with that way of choosing, greedy or drawn
stock     milliseconds of `model.generate()` on the left-padded batch
slow      processors that ran for one request alone
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from shapes import SHAPES, build, common_parser, report_of

from hf_paged import Engine, demo

GREEDY: dict[str, dict[str, Any]] = {
    "none": {},
    "min_new_tokens": {"min_new_tokens": 16},
    "min_length": {"min_length": 48},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 3},
    "bad_words_ids, one token": {"bad_words_ids": [[7], [19]]},
    "bad_words_ids, several tokens": {"bad_words_ids": [[7], [8, 9, 11]]},
    "sequence_bias": {"sequence_bias": [[[7], 2.0], [[19], -2.0]]},
    "suppress_tokens": {"suppress_tokens": [7, 19]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [7, 19]},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (8, 1.05)},
    "remove_invalid_values": {"remove_invalid_values": True},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.2},
}
DRAWN: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature, top_k, top_p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.9},
    "epsilon_cutoff": {"epsilon_cutoff": 3e-4},
    "eta_cutoff": {"eta_cutoff": 3e-4},
    "top_h": {"top_h": 0.5},
    "renormalize_logits": {"renormalize_logits": True},
    "min_new_tokens and top_p": {"min_new_tokens": 16, "top_p": 0.9},
}


def fastest(call: Callable[[], object], device: str, runs: int) -> float:
    """Milliseconds of the fastest call behind one that does not count."""
    call()
    seconds = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * min(seconds)


def prompts_of(rows: int, vocabulary: int) -> list[list[int]]:
    """Prompts of different lengths."""
    chance = torch.Generator().manual_seed(1)
    return [
        torch.randint(10, vocabulary - 10, (12 + 5 * i % 17,), generator=chance).tolist() for i in range(rows)
    ]


def padded(prompts: list[list[int]], device: str) -> dict[str, torch.Tensor]:
    """The prompts as one left-padded batch."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def main() -> None:
    parser = common_parser(__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    for action in parser._actions:
        if action.dest == "shape":
            action.choices = [*SHAPES, "demo"]
    options = parser.parse_args()
    run(options)


def run(options: argparse.Namespace) -> None:
    """The table of all options."""
    dtype = getattr(torch, options.dtype)
    model = demo.model() if options.shape == "demo" else build(options.shape, options.device, dtype)
    model = model.to(options.device)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    prompts = prompts_of(options.rows, model.config.vocab_size)
    batch = padded(prompts, options.device)
    report = report_of(options, rows_of_prompts=options.rows, new=options.new)
    report.table(
        "options", f"{options.rows} prompts, up to {options.new} new tokens", option=("option", ""), engine=("engine, ms", ".0f"),
        beside=("over none", ".2f"), stock=("stock, ms", ".0f"), slow=("slow processors", ""),
    )  # fmt: skip
    for drawn, kinds in ((False, GREEDY), (True, DRAWN)):
        none = 0.0
        for name, kind in kinds.items():
            with report.surviving(name), Engine(model, max_batch_sequences=options.rows) as engine:
                asked = {"max_new_tokens": options.new, "do_sample": drawn, "top_k": 0, **kind}
                run = partial(engine.generate, prompts, progress=False, **asked)
                ours = fastest(run, options.device, options.runs)
                none = none or ours
                stock = fastest(partial(model.generate, **batch, **asked), options.device, options.runs)
                slow = ", ".join(engine.stats()["slow_processors"])
                label = f"{'drawn' if drawn else 'greedy'}: {name}"
                report.row(option=label, engine=ours, beside=ours / none, stock=stock, slow=slow)
    report.end()


if __name__ == "__main__":
    main()
