"""The engine on too few blocks: the requests of a trace on a share of the blocks that they would hold,
preempted in every way.

    python benchmarks/pressure.py --json results.jsonl --timeline steps.jsonl                # on a GPU
    OMP_NUM_THREADS=1 python benchmarks/pressure.py --shape tiny --requests 24 --at-once 12  # on any CPU

First the requests run with enough blocks, up to --at-once at once: that is the throughput they are compared
with. Then with a fifth (--share) of the demand, and each preemption mode. The demand is what all requests
hold together when they are complete, or with --demand peak the most blocks that were held in the first run; a
fifth of that seats a fifth of the sequences, however well they are swapped. Every run is done twice on one
engine, with other tokens of the same lengths; the second counts, when graphs are captured and the host's
memory is there. Exposed is the time by which steps came later for swaps, by CUDA events on the steps' own
stream; the speed of the copies is that of the copies alone, on theirs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from shapes import SHAPES, Report, build, common_parser, report_of
from traces import TRACES, Ask, trace

from hf_paged import Engine

MODES = ("swap", "recompute", "auto")
COUNTED = (
    "tokens",
    "steps",
    "preemptions",
    "swapped_out",
    "swapped_in",
    "recomputed",
    "blocks_out",
    "blocks_in",
    "bytes_out",
    "bytes_in",
)
TIMED = ("copied", "exposed")


class Run(NamedTuple):
    """What came of one run of all requests."""

    seconds: float
    new: int
    counts: dict[str, float]
    peak: int
    answers: list[list[int]]

    @property
    def speed(self) -> float:
        return self.new / self.seconds


class Bench:
    """One model, its requests, and engines with more or fewer blocks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = build(options.shape, options.device, getattr(torch, options.dtype))
        self.model.generation_config.pad_token_id = 0
        self.model.generation_config.eos_token_id = None  # answers are as long as the trace says
        self.vocabulary = SHAPES[options.shape]["vocab_size"]
        self.asks = trace(options.trace, options.requests, self.vocabulary)

    def needs(self, block_size: int) -> list[int]:
        """The blocks that each request holds when it is complete."""
        return [math.ceil((len(ask.prompt) + ask.new) / block_size) for ask in self.asks]

    def engine(self, **options: Any) -> Engine:
        at_once = self.options.at_once
        return Engine(
            self.model,
            max_batch_sequences=at_once,
            max_batch_tokens=max(2048, at_once),
            **{**self.options.engine, **options},
        )

    def run(self, engine: Engine, timeline: Path | None = None) -> Run:
        """All requests twice, with other tokens the second time: that one counts."""
        self.through(engine, 0, None)
        return self.through(engine, 1, timeline)

    def through(self, engine: Engine, turn: int, timeline: Path | None) -> Run:
        before = engine.stats()
        pool = engine.pools.kv_groups[0].pool
        pool.peak_held = 0
        self.wait()
        begin = time.perf_counter()
        handles = [
            engine.submit(self.prompt(ask, turn), max_new_tokens=ask.new, do_sample=False)
            for ask in self.asks
        ]
        lines = []
        while not all(handle.done for handle in handles):
            engine.step()
            if timeline is not None:
                lines.append((time.perf_counter() - begin, engine.stats()))
        self.wait()
        seconds = time.perf_counter() - begin
        after = engine.stats()
        counts = {name: after[name] - before[name] for name in (*COUNTED, *TIMED)}
        if timeline is not None:
            write(timeline, engine.config.preemption, before, lines)
        answers = [handle.result().sequences[0].token_ids for handle in handles]
        return Run(seconds, sum(map(len, answers)), counts, pool.peak_held, answers)

    def prompt(self, ask: Ask, turn: int) -> list[int]:
        return [10 + (token + 7 * turn) % (self.vocabulary - 20) for token in ask.prompt]

    def wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


def write(path: Path, mode: str, before: dict[str, Any], lines: list[tuple[float, dict[str, Any]]]) -> None:
    """The steps of a run: when each was over, who ran and who waited, and what was carried in it."""
    with path.open("a") as file:
        for at, stats in lines:
            moved = {
                name: stats[name] - before[name]
                for name in ("blocks_out", "blocks_in", "preemptions", "tokens", "exposed")
            }
            line = {
                "mode": mode,
                "at": round(at, 6),
                "running": stats["running"],
                "preempted": stats["preempted"],
                **moved,
            }
            print(json.dumps(line), file=file)
            before = stats


def show(report: Report, name: str, blocks: int, run: Run, alone: Run) -> None:
    counts = run.counts
    moved = counts["bytes_out"] + counts["bytes_in"]
    equal = sum(one == other for one, other in zip(run.answers, alone.answers, strict=True))
    report.row(
        mode=name, blocks=blocks, speed=run.speed, ratio=run.speed / alone.speed, computed=counts["tokens"] / alone.counts["tokens"],
        preemptions=int(counts["preemptions"]), swapped=f"{counts['swapped_out']:.0f} / {counts['recomputed']:.0f}",
        carried=f"{counts['blocks_out']:.0f} / {counts['blocks_in']:.0f}", exposed=counts["exposed"] * 1e3,
        share=counts["exposed"] / run.seconds, bandwidth=moved / counts["copied"] / 1e9 if counts["copied"] else None,
        equal=f"{equal} of {len(run.answers)}", seconds=run.seconds, new=run.new, counts=counts,
    )  # fmt: skip


def measure(bench: Bench, report: Report) -> None:
    options = bench.options
    with bench.engine(num_blocks=options.num_blocks, preemption="recompute") as engine:
        size, alone = engine.config.block_size, bench.run(engine)
        total = engine.pools.kv_groups[0].pool.total
    if alone.counts["preemptions"]:
        print(
            f"even with {total} blocks somebody had to go {alone.counts['preemptions']:.0f} times; give more "
            "--num-blocks"
        )
    needs = bench.needs(size)
    demand = sum(needs) if options.demand == "all" else alone.peak
    blocks = max(demand // options.share, math.ceil(max(needs) / 0.98))
    report.table(
        "pressure", f"{options.requests} requests of the {options.trace} trace, up to {options.at_once} at once; complete they hold "
        f"{sum(needs)} blocks of {size} together, where there are enough at most {alone.peak} at once, and "
        f"they get {blocks}",
        mode=("preemption", ""), blocks=("blocks", "d"), speed=("tok/s", ".0f"), ratio=("of unpressured", ".2f"),
        computed=("tokens computed, of unpressured", ".2f"), preemptions=("preemptions", "d"), swapped=("swapped / again", ""),
        carried=("blocks out / in", ""), exposed=("exposed, ms", ".1f"), share=("of the run", ".1%"), bandwidth=("copies, GB/s", ".2f"),
        equal=("answers as unpressured", ""), seconds=("s", ".1f"),
    )  # fmt: skip
    show(report, "none", total, alone, alone)
    for mode in options.modes:
        with report.surviving(mode), bench.engine(num_blocks=blocks, preemption=mode, **({"host_blocks": options.host_blocks}
                              if options.host_blocks is not None and mode != "recompute" else {})) as engine:  # fmt: skip
            show(report, mode, blocks, bench.run(engine, options.timeline), alone)


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, engine=True)
    parser.add_argument("--trace", choices=TRACES, default="sharegpt")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument(
        "--num-blocks",
        type=int,
        help="of the unpressured run; as many as the engine takes by itself if left out",
    )
    parser.add_argument(
        "--demand",
        choices=["all", "peak"],
        default="all",
        help="of all requests together, or the most held at once",
    )
    parser.add_argument(
        "--share", type=int, default=5, help="the pool under pressure is the demand divided by it"
    )
    parser.add_argument("--host-blocks", type=int)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--timeline", type=Path, help="a file that gets a line for each step of the runs under pressure"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    report = report_of(options)
    measure(Bench(options), report)
    report.end()


if __name__ == "__main__":
    main()
