"""Batches whose rows end at different lengths: generate() with and without rows that leave when they end.

    python benchmarks/ended_rows.py --json results.jsonl           # both cases, under four minutes on an H100
    python benchmarks/ended_rows.py --sections short --shape llama1b
    OMP_NUM_THREADS=1 python benchmarks/ended_rows.py --shape tiny --rows 8 --scale 0.05   # on any CPU

short  128 rows, lognormal lengths, mean 338, longest 1,024, the whole model: at most 0.75 of the time
long   128 rows, mean 1,500, longest 8,192, 8 layers: at most 0.45

Lengths come from the tokens alone. The head's weights are the embeddings, moved by one token: after token t
comes t + 1, and a row whose prompt ends n tokens before the EOS token has n tokens. Layers have random
weights and their full cost. Calls are greedy, or sampled at temperature 1 (--sample), with no processor or
criterion but transformers' own. Both ways must give the same tokens. The first call of the way that drops rows captures most sizes; its
column says what that costs.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from shapes import Report, build, common_parser, report_of

import hf_paged
from hf_paged.model.capture.replay import captures_of

LOUD = 1000.0
"""Embeddings are multiplied by it, so that what layers add to them decides no token."""
SHARP = 8.0
"""So is the head, so that a row that is drawn counts on as well."""


class Case(NamedTuple):
    """A batch, and the share of the time that it may take."""

    mean: int
    longest: int
    layers: int | None
    bar: float
    aim: float


CASES = {"short": Case(338, 1024, None, 0.75, 0.68), "long": Case(1500, 8192, 8, 0.45, 0.35)}


def counting(model: Any) -> Any:
    """The model, so that it says t + 1 after token t."""
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        unit = embeddings / embeddings.norm(dim=1, keepdim=True)
        head.copy_(unit.roll(1, 0) * SHARP)
        embeddings.mul_(LOUD)
    return model


def lengths(case: Case, rows: int, scale: float) -> list[int]:
    """Lognormal lengths, as those of benchmarks/traces.py."""
    chance = random.Random(0)
    longest, mean = max(8, int(case.longest * scale)), case.mean * scale
    return [min(longest, max(4, int(chance.lognormvariate(math.log(mean) - 0.5, 1.0)))) for _ in range(rows)]


class Bench:
    """One model and one batch, called in both ways."""

    def __init__(self, options: argparse.Namespace, case: Case) -> None:
        self.options = options
        self.lengths = lengths(case, options.rows, options.scale)
        layers = {"num_hidden_layers": case.layers} if case.layers and options.shape != "tiny" else {}
        room = options.prompt + max(self.lengths) + 1
        dtype = getattr(torch, options.dtype)
        model = build(options.shape, options.device, dtype, max_position_embeddings=room, **layers)
        self.model = counting(model)
        self.eos = model.config.vocab_size - 2
        ids = torch.randint(
            10, 1000, (options.rows, options.prompt), generator=torch.Generator().manual_seed(1)
        )
        ids[:, -1] = self.eos - torch.tensor(self.lengths)
        self.ids = ids.to(options.device)

    def call(self, drop_ended: str) -> tuple[float, float, torch.Tensor]:
        """Seconds of a call, those of captures among them, and its answer."""
        pool = captures_of(self.model).pool
        before = pool.seconds
        torch.manual_seed(0)
        begin = self.now()
        answer = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=max(self.lengths),
            do_sample=self.options.sample,
            top_k=0 if self.options.sample else None,
            eos_token_id=self.eos,
            pad_token_id=0,
            cache_implementation="paged",
            cache_config={"drop_ended": drop_ended},
        )
        return self.now() - begin, pool.seconds - before, answer

    def now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def check(self, answer: torch.Tensor) -> None:
        """Raise unless every row has its length, and pads behind it."""
        new = answer[:, self.ids.shape[1] :]
        ends = torch.tensor(self.lengths, device=new.device)[:, None] - 1
        place = torch.arange(new.shape[1], device=new.device)
        expected = (self.eos - ends + place).where(place <= ends, 0)
        assert torch.equal(new, expected), "a row has not the length that its prompt asks for"


def measure(bench: Bench, case: Case, report: Report, name: str) -> None:
    """A warm-up of the way that drops rows, then both in turn."""
    steps = max(bench.lengths)
    left = sum(bench.lengths) / steps / len(bench.lengths)
    first, _, answer = bench.call("auto")
    bench.check(answer)
    seconds: dict[str, list[float]] = {"auto": [], "off": []}
    captures = {"auto": 0.0, "off": 0.0}
    rows = {}
    for _ in range(bench.options.rounds):
        for way in seconds:
            before = hf_paged.stats(bench.model).rows_computed
            taken, captured, answer = bench.call(way)
            bench.check(answer)
            seconds[way].append(taken)
            captures[way] += captured
            rows[way] = hf_paged.stats(bench.model).rows_computed - before
    auto, off = (min(seconds[way]) for way in ("auto", "off"))
    ratio = auto / off
    met = "aim" if ratio <= case.aim else "must" if ratio <= case.bar else "**no**"
    report.row(
        case=name, rows=len(bench.lengths), mean=sum(bench.lengths) / len(bench.lengths), steps=steps,
        left=left, computed=rows["auto"] / rows["off"], first=first, off=off, auto=auto,
        captured_off=captures["off"], captured_auto=captures["auto"], ratio=ratio, bar=case.bar,
        met=met if bench.options.shape == "llama8b" else None,
    )  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `run`."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--rows", type=int, default=128 if on_gpu else 8)
    parser.add_argument("--prompt", type=int, default=160, help="tokens of every prompt")
    parser.add_argument("--scale", type=float, default=1.0 if on_gpu else 0.05, help="of all lengths")
    parser.add_argument("--sample", action="store_true", help="draw tokens, for all rows of the batch")
    parser.add_argument("--rounds", type=int, default=1, help="calls of each way; the fastest counts")


def run(options: argparse.Namespace, report: Report, names: Iterable[str]) -> None:
    """The table of cases."""
    report.table(
        "ended_rows", f"Rows that leave when they end: {options.shape}, {options.dtype}, prompts of {options.prompt}, {'sampled' if options.sample else 'greedy'}",
        case=("case", ""), rows=("rows", ""), mean=("mean length", ".0f"), steps=("steps", ""),
        left=("tokens of rows x steps", ".2f"), computed=("rows computed", ".2f"),
        first=("first call s", ".2f"), off=("all rows s", ".2f"), captured_off=("in captures", ".2f"),
        auto=("rows leave s", ".2f"), captured_auto=("in captures", ".2f"), ratio=("of the time", ".3f"),
        bar=("bar", ""), met=("met", ""),
    )  # fmt: skip
    for name in names:
        with report.surviving(name):
            measure(Bench(options, CASES[name]), CASES[name], report, name)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    parser = common_parser(__doc__, CASES)
    add_options(parser)
    options = parser.parse_args()
    report = report_of(options)
    run(options, report, options.sections)
    report.end()


if __name__ == "__main__":
    main()
