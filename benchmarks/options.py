"""The cost of generation options.

    python benchmarks/options.py --json results.jsonl                   # on a GPU
    OMP_NUM_THREADS=1 python benchmarks/options.py --shape demo         # the demo model, on any CPU

each: the same prompts through the engine under each option, beside no option and beside stock's padded batch
    engine    milliseconds for all prompts through `Engine.generate()`, the fastest of some runs
    beside    the same over what no option costs with that way of choosing, greedy or drawn
    stock     milliseconds of `model.generate()` on the left-padded batch
    slow      processors that ran for one request alone
half: decoding steps of rows of which every second one has what clients of OpenAI's API send
    step      milliseconds of a step, the median
    beside    the same over that of rows without any of it
host: the same steps, but the host's part alone: the device has layers of next to no width to compute
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from host import DRIVERS, measure
from shapes import SHAPES, Report, build, common_parser, report_of

from hf_paged import Engine, demo
from hf_paged.engine.requests.keywords import OpenAIOptions

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
    "presence and frequency penalty": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {7: 2.0, 19: -2.0}},
    "stop": {"stop": ["the end", "\n\n"]},
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

STOP = {"stop": ["the end", "\n\n"]}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5}
HALF: dict[str, dict[str, Any]] = {
    "none": {},
    "stop": STOP,
    "penalties": PENALTIES,
    "stop and penalties": {**STOP, **PENALTIES},
}
"""The options of every second row."""
STEPS = 60
NO_END = 2**31 - 1
"""An end of sequence that no model has."""


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
    parser = common_parser(__doc__, ["each", "half", "host"])
    parser.add_argument("--rows", type=int, help="32, and 64 where every second one asks for something")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    for action in parser._actions:
        if action.dest == "shape":
            action.choices = [*SHAPES, "demo"]
    options = parser.parse_args()
    report = report_of(options, new=options.new)
    if {"each", "half"} & set(options.sections):
        model = model_of(options)
        if "each" in options.sections:
            each(options, model, report)
        if "half" in options.sections:
            half(options, model, report)
    if "host" in options.sections:
        host(options, report)
    report.end()


def model_of(options: argparse.Namespace) -> Any:
    dtype = getattr(torch, options.dtype)
    model = demo.model() if options.shape == "demo" else build(options.shape, options.device, dtype)
    model = model.to(options.device)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    return model


def each(options: argparse.Namespace, model: Any, report: Report) -> None:
    """The table of all options."""
    rows = options.rows or 32
    prompts = prompts_of(rows, model.config.vocab_size)
    batch = padded(prompts, options.device)
    report.table(
        "options", f"{rows} prompts, up to {options.new} new tokens", option=("option", ""), engine=("engine, ms", ".0f"),
        beside=("over none", ".2f"), stock=("stock, ms", ".0f"), slow=("slow processors", ""),
    )  # fmt: skip
    for drawn, kinds in ((False, GREEDY), (True, DRAWN)):
        none = 0.0
        for name, kind in kinds.items():
            asked = {"max_new_tokens": options.new, "do_sample": drawn, "top_k": 0, **kind}
            with (
                report.surviving(name),
                Engine(model, demo.tokenizer(), max_batch_sequences=rows) as engine,
            ):
                run = partial(engine.generate, prompts, progress=False, **asked)
                ours = fastest(run, options.device, options.runs)
                none = none or ours
                slow = ", ".join(engine.stats()["slow_processors"])
                theirs = not kind.keys() & OpenAIOptions.__annotations__.keys()
                run = partial(model.generate, **batch, **asked)
                stock = fastest(run, options.device, options.runs) if theirs else None
                label = f"{'drawn' if drawn else 'greedy'}: {name}"
                report.row(option=label, engine=ours, beside=ours / none, stock=stock, slow=slow)


def step_of(engine: Engine, prompts: list[list[int]], drawn: bool, asked: dict[str, Any]) -> float:
    """Milliseconds of a step of the engine's own loop in which all prompts decode: the median. asked: by every
    second one.
    """
    common = {"max_new_tokens": 8 * STEPS, "eos_token_id": NO_END, "do_sample": drawn, "top_k": 0}
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, **common, **(asked if i % 2 else {}))
    step = DRIVERS["the engine"](engine)
    for _ in range(STEPS):  # prompts, captures
        step()
    # A CPU has others to work for; a device computes while the host waits.
    clock = time.thread_time if engine.model.device.type == "cpu" else time.perf_counter
    seconds = []
    for _ in range(STEPS):
        begin = clock()
        step()  # it waits for the tokens of a step, so that one after another takes what a step takes
        seconds.append(clock() - begin)
    return 1e3 * statistics.median(seconds)


def half(options: argparse.Namespace, model: Any, report: Report) -> None:
    """Rows of which every second one asks for something."""
    rows = options.rows or 64
    prompts = prompts_of(rows, model.config.vocab_size)
    report.table(
        "options half", f"A decoding step of {rows} rows of which every second one has the options, the best of {options.runs}",
        option=("options", ""), drawn=("drawn", ""), step=("step, ms", ".2f"), beside=("over none", ".3f"), slow=("slow processors", ""),
    )  # fmt: skip
    for drawn in (False, True):
        found: dict[str, list[float]] = {name: [] for name in HALF}
        slow: dict[str, str] = {}
        for _ in range(options.runs):  # in turns: a machine has its slow minutes
            for name, kind in HALF.items():
                with Engine(model, demo.tokenizer(), max_batch_sequences=rows) as engine:
                    found[name].append(step_of(engine, prompts, drawn, kind))
                    slow[name] = ", ".join(engine.stats()["slow_processors"])
        for name, steps in found.items():
            beside = min(steps) / min(found["none"])
            report.row(option=name, drawn=str(drawn), step=min(steps), beside=beside, slow=slow[name])


def host(options: argparse.Namespace, report: Report) -> None:
    """The host's work in such steps."""
    rows = options.rows or 64
    report.table(
        "options host", f"The host's work in a greedy step of {rows} rows of which every second one has the options, 32 layers",
        option=("options", ""), whole=("ms, median", ".3f"), sample=("choosing, mean", ".3f"), apply=("giving, mean", ".3f"),
        more=("more than none, ms", ".3f"),
    )  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {name: [] for name in HALF}
    for _ in range(options.runs):
        for name, kind in HALF.items():
            found[name].append(measure(32, options.device, rows, "the engine", asked=kind))
    none = min(each["whole"] for each in found["none"])
    for name, runs in found.items():
        best = min(runs, key=lambda run: run["whole"])
        report.row(option=name, **best, more=best["whole"] - none)


if __name__ == "__main__":
    main()
