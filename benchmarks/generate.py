"""generate() as a user calls it, stock against paged, beside the bars: 8B Llama shape, random weights,
bfloat16, no compile.

    python benchmarks/generate.py --json results.jsonl             # every section, five minutes on an H200
    python benchmarks/generate.py --sections steps --rows 1 8      # a part of it
    python benchmarks/generate.py --sections beams --widths 4 --shape qwen8b   # a hybrid
    OMP_NUM_THREADS=1 python benchmarks/generate.py --shape tiny   # does it run? on any CPU, in two minutes

Each row is printed as soon as it is known, and kept as a JSON line; a row that fails says so, and the next
one goes on. `benchmarks/plot.py` draws the steps from the JSON. The sections:

warmup  the first paged calls of a process: a short one must not pay for a capture, the first long one may, for
        up to 5 s
memory  bytes of keys and values of a beam search of width 8 over a long prompt
steps   milliseconds of a greedy step: (a call of 80 tokens - a call of 16) / 64, and by a clock inside the loop
beams   seconds of 16 beam searches of width 4 and 8
modes   every way of calling generate() that the tests compare: milliseconds a call, nowhere more than 2 % over
        stock
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from calls import modes_of
from shapes import Report, build, common_parser, report_of
from transformers import LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged.model.registry import memory_of

CONTEXT, SHORT, LONG = 384, 16, 80
BYTES_A_SECOND, OPERATIONS_A_SECOND = 4.3e12, 790e12
"""What an H200 was measured to do: a copy, and bfloat16 products."""
NAMES = {False: "stock", True: "paged"}
WARMUP_BAR, MEMORY_BAR, MODES_BAR = 5.0, 1.3, 1.02
MODES_SECONDS = 150
"""After that many seconds, modes that are near the bar get no further rounds."""


class Bar(NamedTuple):
    """What others need, and what is wanted: milliseconds of a step, seconds of the searches; for the 8B shape
    on an H200.
    """

    vllm: float
    must: float
    aim: float

    def met(self, value: float) -> str:
        return "aim" if value <= self.aim else "must" if value <= self.must else "no"


STEP_BARS = {
    1: Bar(4.96, 7.2, 6.0),
    8: Bar(5.07, 7.8, 6.3),
    64: Bar(6.55, 9.2, 7.8),
    256: Bar(12.92, 15.5, 13.5),
}
BEAM_BARS = {4: Bar(2.59, 1.1, 0.7), 8: Bar(5.24, 1.7, 1.1)}


class Bench:
    """One model, and the two ways of calling it."""

    def __init__(self, options: argparse.Namespace, report: Report, model: Any = None) -> None:
        self.options, self.report = options, report
        if model is None:
            layers = {"num_hidden_layers": options.layers} if options.layers else {}
            model = build(options.shape, options.device, getattr(torch, options.dtype), **layers)
        self.model = model
        self.model.generation_config.pad_token_id = 0
        self.word = {
            "cache_implementation": "paged",
            **({"cache_config": options.cache} if options.cache else {}),
        }
        self.on_gpu = self.model.device.type == "cuda"

    def prompt(self, rows: int, tokens: int) -> torch.Tensor:
        """Random ids [rows, tokens], the same at every call."""
        random = torch.Generator(self.model.device).manual_seed(1)
        return torch.randint(10, 1000, (rows, tokens), device=self.model.device, generator=random)

    def call(self, paged: bool, ids: torch.Tensor, new: int, **arguments: Any) -> tuple[float, Any]:
        """The seconds of a call of exactly `new` tokens, and its answer."""
        length = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
        given = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            **length,
            **arguments,
            **(self.word if paged else {}),
        }
        torch.manual_seed(0)
        self.synchronize()
        begin = time.perf_counter()
        answer = self.model.generate(**given)
        self.synchronize()
        return time.perf_counter() - begin, answer

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def rest(self) -> None:
        """Give back all memory that is idle, so that a row does not see what the rows before it needed."""
        gc.collect()
        hf_paged.release(self.model)
        if self.on_gpu:
            torch.cuda.empty_cache()

    def rounds(self, paged: bool) -> int:
        """How often a long call is measured: stock's eat time, and need no precision."""
        return self.options.rounds if paged else 1

    def both(self, what: str, measure: Callable[[bool], Any]) -> dict[bool, Any]:
        """What `measure` says of paged and of stock; a side that fails is missing. Paged comes first, as it
        may fail.
        """
        sides = {}
        for paged in (True, False):
            with self.report.surviving(f"{what}, {NAMES[paged]}"):
                self.rest()
                sides[paged] = measure(paged)
        return sides

    def bar(self, bars: dict[int, Bar], key: int, value: float) -> dict[str, Any]:
        """The bar of a row and whether `value` meets it, where that means something."""
        bar = bars.get(key) if self.options.shape == "llama8b" else None
        return {} if bar is None else {**bar._asdict(), "met": bar.met(value)}


# ---- the first calls of a process


def warmup(bench: Bench) -> None:
    bench.report.table(
        "warmup", f"The first paged calls of a process, s; prompt {CONTEXT}; warm-up = what the first two calls of 64 take over the third",
        rows=("rows", "d"), stock=("stock, 16 new, warm", ".2f"), first=("paged, first of 16", ".2f"),
        long=("first of 64", ".2f"), again=("second of 64", ".2f"), warm=("third of 64", ".2f"), warmup=("warm-up", ".2f"), met=("5 s", ""),
    )  # fmt: skip
    for rows in (1, 4):  # few, so that the next section meets a small pool
        with bench.report.surviving(f"warmup, {rows} rows"):
            ids = bench.prompt(rows, CONTEXT)
            _, stock = (
                bench.call(False, ids, 16)[0] for _ in range(2)
            )  # whatever CUDA itself needs first is paid here
            first = bench.call(True, ids, 16)[0]  # one only: many short calls may pay for a capture after all
            long, again, warm = (bench.call(True, ids, 64)[0] for _ in range(3))
            paid = long + again - 2 * warm
            bench.report.row(
                rows=rows, stock=stock, first=first, long=long, again=again, warm=warm, warmup=paid,
                met="met" if paid <= WARMUP_BAR else "no",
            )  # fmt: skip


# ---- a greedy step


class Clock(LogitsProcessor):
    """Notes when each step has its logits. It waits for nothing: the loop itself does, once a step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores

    @property
    def steps(self) -> list[float]:
        # The first interval waits for the prompt.
        return [late - early for early, late in zip(self.times[1:], self.times[2:], strict=False)]


class StepTimes(NamedTuple):
    """Milliseconds of a step, by both ways of measuring, and the tokens of the call."""

    difference: float
    clock: float
    tokens: torch.Tensor


def step_times(bench: Bench, paged: bool, ids: torch.Tensor, rounds: int) -> StepTimes:
    short, long, steps = [], [], []
    bench.call(paged, ids, LONG)
    for _ in range(rounds):
        clock = Clock()
        short.append(bench.call(paged, ids, SHORT, logits_processor=LogitsProcessorList([Clock()]))[0])
        seconds, tokens = bench.call(paged, ids, LONG, logits_processor=LogitsProcessorList([clock]))
        long.append(seconds)
        steps += clock.steps
    difference = (statistics.median(long) - statistics.median(short)) / (LONG - SHORT)
    return StepTimes(difference * 1e3, statistics.median(steps) * 1e3, tokens[:, ids.shape[1] :])


def token_bytes(model: torch.nn.Module) -> int:
    """Bytes of keys and values of one token."""
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize


def floor(model: torch.nn.Module, rows: int, columns: int) -> float:
    """Milliseconds in which an H200 can read weights and cache once or, if that is more, do the products."""
    weights = (
        sum(weight.numel() for weight in model.parameters()) - model.get_input_embeddings().weight.numel()
    )
    reading = (weights * model.dtype.itemsize + rows * columns * token_bytes(model)) / BYTES_A_SECOND
    return max(reading, 2 * weights * rows / OPERATIONS_A_SECOND) * 1e3


def steps(bench: Bench) -> None:
    bench.report.table(
        "steps", f"A greedy step, ms; prompt {CONTEXT}; ({LONG} new - {SHORT} new) / {LONG - SHORT}, and the median by a clock in the loop",
        rows=("rows", "d"), stock=("stock", ".2f"), paged=("paged", ".2f"), ratio=("paged / stock", ".3f"),
        stock_clock=("stock, clock", ".2f"), paged_clock=("paged, clock", ".2f"), vllm=("vLLM 0.25.1", ".2f"), must=("must", ".1f"),
        aim=("aim", ".1f"), met=("met", ""), floor=("floor", ".2f"), same=("same tokens", ".0%"),
    )  # fmt: skip
    for rows in bench.options.rows:
        ids = bench.prompt(rows, CONTEXT)
        sides = bench.both(
            f"steps, {rows} rows", lambda paged, ids=ids: step_times(bench, paged, ids, bench.rounds(paged))
        )
        if True in sides:
            bench.report.row(rows=rows, **step_values(bench, rows, sides[True], sides.get(False)))


def step_values(bench: Bench, rows: int, paged: StepTimes, stock: StepTimes | None) -> dict[str, Any]:
    values: dict[str, Any] = {"paged": paged.difference, "paged_clock": paged.clock}
    values["floor"] = floor(bench.model, rows, CONTEXT + (SHORT + LONG) // 2)
    if stock is not None:
        values |= {
            "stock": stock.difference,
            "stock_clock": stock.clock,
            "ratio": paged.difference / stock.difference,
        }
        values["same"] = (stock.tokens == paged.tokens).float().mean().item()
    return values | bench.bar(STEP_BARS, rows, max(paged.difference, paged.clock))


# ---- beam searches


def beams(bench: Bench) -> None:
    bench.report.table(
        "beams", "16 beam searches, prompts of 256, 64 new, s",
        width=("width", "d"), stock=("stock", ".2f"), paged=("paged", ".2f"), ratio=("paged / stock", ".3f"), vllm=("vLLM 0.25.1", ".2f"),
        must=("must", ".1f"), aim=("aim", ".1f"), met=("met", ""), same=("same tokens", ".0%"),
    )  # fmt: skip
    ids = bench.prompt(16, 256)
    for width in bench.options.widths:
        sides = bench.both(
            f"beams, width {width}", lambda paged, width=width: beam_seconds(bench, paged, ids, width)
        )
        values: dict[str, Any] = {NAMES[paged]: seconds for paged, (seconds, _) in sides.items()}
        if len(sides) == 2:
            values["ratio"] = values["paged"] / values["stock"]
            values["same"] = (sides[True][1] == sides[False][1])[:, 256:].float().mean().item()
        bench.report.row(width=width, **values, **bench.bar(BEAM_BARS, width, values.get("paged", math.inf)))


def beam_seconds(bench: Bench, paged: bool, ids: torch.Tensor, width: int) -> tuple[float, torch.Tensor]:
    """The median of warm calls, and the tokens."""
    bench.call(paged, ids, 64, num_beams=width)
    calls = [bench.call(paged, ids, 64, num_beams=width) for _ in range(bench.rounds(paged))]
    return statistics.median(seconds for seconds, _ in calls), calls[-1][1]


# ---- memory


class Watch(LogitsProcessor):
    """The most that the pools held, and that was allocated, when a step had its logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.memory, self.on_gpu = memory_of(model), model.device.type == "cuda"
        self.held = self.pools = self.allocated = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.held = max(
            self.held, sum(group.pool.held * group.block_bytes for group in self.memory.groups.values())
        )
        self.pools = max(self.pools, self.memory.bytes)
        if self.on_gpu:
            self.allocated = max(self.allocated, torch.cuda.memory_allocated())
        return scores


def memory(bench: Bench, prompt: int = 2048, new: int = 64, width: int = 8) -> None:
    one = (prompt + new) * token_bytes(bench.model)
    least = one + (width - 1) * new * token_bytes(bench.model)
    bench.report.table(
        "memory", f"Keys and values of a beam search of width {width}, prompt {prompt}, {new} new, MiB; one sequence is {one / 2**20:.1f}, "
        f"with the tails of the other {width - 1} beams {least / 2**20:.1f}; the bar is {MEMORY_BAR} times "
        "that",
        cache=("cache", ""), held=("held at the peak", ".1f"), of_one=("/ one sequence", ".2f"), of_least=("/ one and tails", ".2f"),
        met=("met", ""), pools=("pool allocated", ".1f"), between=("all that is allocated between steps", ".1f"),
        peak=("and at the peak", ".1f"),
    )  # fmt: skip
    for paged in (False, True):
        with bench.report.surviving(f"memory, {NAMES[paged]}"):
            bench.rest()
            before = torch.cuda.memory_allocated() if bench.on_gpu else 0
            if bench.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            watch = Watch(bench.model)
            arguments = {
                "num_beams": width,
                "return_dict_in_generate": True,
                "logits_processor": LogitsProcessorList([watch]),
            }
            _, answer = bench.call(paged, bench.prompt(1, prompt), new, **arguments)
            peak = torch.cuda.max_memory_allocated() - before if bench.on_gpu else None
            tensors = (
                []
                if paged
                else [data for layer in answer.past_key_values.layers for data in (layer.keys, layer.values)]
            )
            held = watch.held + sum(data.nbytes for data in tensors)
            bench.report.row(
                cache=NAMES[paged], held=held / 2**20, of_one=held / one, of_least=held / least,
                met="" if not paged else "met" if held <= MEMORY_BAR * least else "no", pools=watch.pools / 2**20 if paged else None,
                between=(watch.allocated - before) / 2**20 if bench.on_gpu else None, peak=None if peak is None else peak / 2**20,
            )  # fmt: skip
            del answer, tensors


# ---- every mode


def assistant_of(bench: Bench) -> torch.nn.Module:
    """A model of two layers that drafts four tokens at a time, whatever it thinks of them."""
    assistant = build(bench.options.shape, bench.options.device, bench.model.dtype, num_hidden_layers=2)
    config = assistant.generation_config
    config.pad_token_id, config.num_assistant_tokens, config.num_assistant_tokens_schedule = 0, 4, "constant"
    config.assistant_confidence_threshold = 0.0
    return assistant


def compare(
    bench: Bench, ids: torch.Tensor, new: int, arguments: dict[str, Any], deadline: float
) -> dict[bool, list[float]]:
    """Milliseconds of warm calls, stock and paged in turns; calls that are nearly equal get more of them."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(5):
        for paged in (False, True) if turn % 2 else (True, False):
            seconds = bench.call(paged, ids, new, **arguments)[0]
            if turn:
                times[paged].append(seconds * 1e3)
        if turn >= 2 and (ratio(times) < 0.9 or time.perf_counter() > deadline):
            break
    return times


def ratio(times: dict[bool, list[float]]) -> float:
    return statistics.median(times[True]) / statistics.median(times[False])


def modes(bench: Bench, prompt: int = 128, new: int = 32) -> None:
    bench.report.table(
        "modes", f"Every mode, ms a call; prompt {prompt}, {new} new; over = more than 2 % slower than stock",
        rows=("rows", "d"), mode=("mode", ""), stock=("stock", ".1f"), paged=("paged", ".1f"), ratio=("paged / stock", ".3f"),
        over=("over", ""),
    )  # fmt: skip
    bench.rest()
    assistant, worst = assistant_of(bench), 0.0
    deadline = time.perf_counter() + MODES_SECONDS
    for rows in bench.options.mode_rows:
        ids = bench.prompt(rows, prompt)
        for name, arguments in modes_of(ids, new, assistant if rows == 1 else None).items():
            with bench.report.surviving(f"modes, {name}, {rows} rows"):
                times = compare(bench, ids, new, arguments, deadline)
                stock, paged = (statistics.median(times[side]) for side in (False, True))
                worst = max(worst, paged / stock)
                bench.report.row(
                    rows=rows, mode=name, stock=stock, paged=paged, ratio=paged / stock,
                    over="**over**" if paged / stock > MODES_BAR else "", stock_calls=times[False], paged_calls=times[True],
                )  # fmt: skip
    print(f"worst ratio {worst:.3f}", flush=True)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "warmup": warmup,
    "memory": memory,
    "steps": steps,
    "beams": beams,
    "modes": modes,
}
"""In the order in which they run: the first calls of the process, then the memory of a pool that was never
larger.
"""


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, SECTIONS)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256], help="of the steps")
    parser.add_argument("--mode-rows", type=int, nargs="+", default=[1, 32], help="of the modes")
    parser.add_argument("--rounds", type=int, default=3, help="measured paged calls of steps and beams")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--widths", type=int, nargs="+", default=[*BEAM_BARS], help="of the beam searches")
    parser.add_argument(
        "--cache",
        type=json.loads,
        default={},
        help="""cache_config of the paged calls, such as '{"graphs": false}'""",
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    report = report_of(options, cache_config=options.cache)
    with tempfile.TemporaryDirectory() as cold:
        if "warmup" in options.sections:
            os.environ["TRITON_CACHE_DIR"] = cold
        bench = Bench(options, report)
        for name, section in SECTIONS.items():
            if name in options.sections:
                begin = time.perf_counter()
                with report.surviving(name):
                    section(bench)
                print(f"({name}: {time.perf_counter() - begin:.0f} s)", flush=True)
    report.end()


if __name__ == "__main__":
    main()
