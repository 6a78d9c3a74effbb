"""The engine on the requests of a trace: 8B Llama shape, random weights, bfloat16, lengths forced, greedy.

    python benchmarks/engine.py --json results.jsonl                # on a GPU
    OMP_NUM_THREADS=1 python benchmarks/engine.py --shape tiny --requests 24 --at-once 8 --rows 1 4   # on any CPU

steps     milliseconds of a step in which every sequence takes one token, by the clock around `Engine.step()`
trace     output tokens a second, time to the first token, time between tokens, and what the books did, beside
          other engines
load      the same where requests come one by one
shared    requests that begin alike
beams     seconds of 16 beam searches of width 4 and 8, beside paged and stock generate() over the same rows
beside    a step of 64 rows some of which need the host for their next token
host      what the host does in a decoding step and how long that takes, with a model of next to no width
startup   seconds from `Engine(model)` to the first token, and to the first replayed step, with and without
          compiled layers
profile   where the time of a decoding step goes on the host
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import generate
import torch
from host import DRIVERS, PARTS, measure
from peers import Served, peers
from shapes import SHAPES, Report, build, common_parser, report_of
from traces import TRACES, Ask, trace

from hf_paged import Engine

CONTEXT = 384
BEAM_BARS = generate.BEAM_BARS | {4: generate.Bar(2.59, 0.8, 0.5)}


class Bench:
    """One model and what to do with it."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report = options, report

    @cached_property
    def model(self) -> Any:
        """Made when it is asked for: not every section needs it."""
        model = build(self.options.shape, self.options.device, getattr(torch, self.options.dtype))
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None  # answers are as long as the trace says
        return model

    def wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def engine(self, at_once: int, **more: Any) -> Engine:
        options = {
            "max_batch_sequences": at_once,
            "max_batch_tokens": max(2048, at_once),
            **self.options.engine,
            **more,
        }
        return Engine(self.model, **options)

    def prompts(self, rows: int, context: int) -> list[list[int]]:
        random = torch.Generator().manual_seed(1)
        return torch.randint(
            10, SHAPES[self.options.shape]["vocab_size"] - 10, (rows, context), generator=random
        ).tolist()


def decode_steps(
    bench: Bench, engine: Engine, rows: int, steps: int, context: int = CONTEXT, watch: Callable[[Engine], None] | None = None,
    others: Sequence[dict[str, Any]] = (),
) -> list[float]:  # fmt: skip
    """Seconds of steps in which nothing but decoding happens. watch: sees the engine after each of them.
    others: what the last requests ask beyond that; the rows are those of all."""
    new = (
        64 * steps
    )  # nobody ends in between; a prompt is not computed in one step, so some are ahead of others
    asked = [{}] * (rows - sum(each.get("num_beams", 1) for each in others)) + [*others]
    prompts = bench.prompts(len(asked), context)
    handles = [
        engine.submit(prompt, max_new_tokens=new, do_sample=False, **each)
        for prompt, each in zip(prompts, asked, strict=True)
    ]
    seen = -1
    while engine.stats()["waiting"] or engine.stats()["tokens"] - seen != rows:
        seen = engine.stats()["tokens"]
        engine.step()
        ended = [handle.result() for handle in handles if handle.done]
        if ended:
            raise RuntimeError(f"a request ended before all rows ran: {ended[0].error}")
    for _ in range(8):
        engine.step()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()  # it waits for the tokens of a step, so that one after another takes what a step takes
        seconds.append(time.perf_counter() - begin)
        if watch is not None:
            watch(engine)
    for handle in handles:
        handle.cancel()
    return seconds


def steps(bench: Bench) -> None:
    bench.report.table(
        "engine steps", f"A decoding step of the engine, prompts of {CONTEXT}", rows=("rows", "d"), context=("context, mean", ".0f"),
        median=("ms, median", ".2f"), worst=("ms, the slowest", ".2f"), replayed=("from graphs", "d"), compiled=("compiled graphs", "d"),
    )  # fmt: skip
    for rows in bench.options.rows:
        # Prompts in few steps: who is first is not far ahead when the last one comes.
        with (
            bench.report.surviving(f"steps, {rows} rows"),
            bench.engine(rows, max_batch_tokens=max(2048, 16 * rows)) as engine,
        ):
            seconds = decode_steps(bench, engine, rows, 32)
            captured, context = engine.stats()["graphs"], engine.stats()["tokens"] / rows - 16
            bench.report.row(
                rows=rows, context=context, median=statistics.median(seconds) * 1e3, worst=max(seconds) * 1e3,
                replayed=captured.get("replayed", 0), compiled=captured.get("compiled", 0),
            )  # fmt: skip


def serve(
    bench: Bench,
    name: str,
    at_once: int,
    asks: Sequence[Ask],
    arrivals: Sequence[float] | None = None,
    **options: Any,
) -> Served:
    """What an engine makes of a trace, after it has seen some of it and the same lengths of others, which arrive
    in the same way: only then have steps of the sizes that are timed been captured.
    """
    peer = peers()[name](
        bench.model, at_once, **(bench.options.engine | options if name == "hf_paged" else options)
    )
    others = trace(
        bench.options.trace,
        bench.options.warm_up or len(asks),
        SHAPES[bench.options.shape]["vocab_size"],
        seed=1,
    )
    try:
        peer.serve(others, None if arrivals is None else arrivals[: len(others)])
        bench.wait()
        return peer.serve(asks, arrivals)
    finally:
        peer.close()


def shown(values: list[float], scale: float = 1.0) -> str:
    """The half and the 99th of a hundred."""
    if not values:
        return ""
    ranked = sorted(values)
    return f"{ranked[len(ranked) // 2] * scale:.2f} / {ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))] * scale:.2f}"


COLUMNS = {
    "engine": ("engine", ""), "speed": ("tok/s", ".0f"), "first": ("first token, s", ""), "between": ("between tokens, ms", ""),
    "host": ("host work a step, ms", ".2f"), "waste": ("waste", ".1%"), "preemptions": ("preemptions", "d"), "hits": ("blocks found", "d"),
    "seconds": ("s", ".1f"),
}  # fmt: skip


def told(bench: Bench, name: str, served: Served, **more: Any) -> None:
    notes = dict(served.notes)
    host = notes.pop("host", None)
    bench.report.row(
        engine=name, speed=served.tokens / served.seconds, first=shown(served.first), between=shown(served.between, 1e3),
        seconds=served.seconds, tokens=served.tokens, host=None if host is None else host * 1e3, **notes, **more,
    )  # fmt: skip


def run_trace(bench: Bench) -> None:
    options = bench.options
    bench.report.table(
        "engine trace", f"{options.requests} requests of the {options.trace} trace, all there from the "
        "beginning, output tokens a second; first token and between tokens: p50 / p99", at_once=("up to at once", "d"), **COLUMNS,
    )  # fmt: skip
    asks = trace(options.trace, options.requests, SHAPES[options.shape]["vocab_size"])
    for at_once in options.at_once:
        for name in options.peers or peers():
            with bench.report.surviving(f"trace, {name}, {at_once} at once"):
                told(bench, name, serve(bench, name, at_once, asks), at_once=at_once)


def load(bench: Bench) -> None:
    """Requests that come one by one, at random, so many a second on average."""
    options = bench.options
    bench.report.table(
        "engine load", f"{options.requests} requests of the {options.trace} trace, Poisson arrivals; first token and between tokens: "
        "p50 / p99", rate=("requests a second", ".1f"), **COLUMNS,
    )  # fmt: skip
    asks = trace(options.trace, options.requests, SHAPES[options.shape]["vocab_size"])
    for rate in options.rates:
        chance = random.Random(2)
        arrivals = list(accumulate(chance.expovariate(rate) for _ in asks))
        for name in [name for name in options.peers or peers() if name != "vllm"]:
            with bench.report.surviving(f"load, {name}, {rate} a second"):
                told(bench, name, serve(bench, name, max(options.at_once), asks, arrivals), rate=rate)


def shared(bench: Bench) -> None:
    """Requests that begin alike."""
    options = bench.options
    vocabulary = SHAPES[options.shape]["vocab_size"]
    common = trace("alpaca", 1, vocabulary, seed=3)[0].prompt * options.shared
    asks = [
        Ask([*common[: options.shared], *ask.prompt[:128]], 32)
        for ask in trace(options.trace, 64, vocabulary, seed=4)
    ]
    bench.report.table(
        "engine shared", f"64 requests, {options.shared} tokens in common, up to 128 of their own, 32 new", cached=("prefix cache", ""),
        **COLUMNS,
    )  # fmt: skip
    for cached in (True, False):
        with bench.report.surviving(f"shared prefixes, {cached}"):
            told(
                bench,
                "hf_paged",
                serve(bench, "hf_paged", 64, asks, prefix_caching=cached),
                cached=str(cached),
            )


def beams(bench: Bench, searches: int = 16, prompt: int = 256, new: int = 64) -> None:
    bench.report.table(
        "engine beams", f"{searches} beam searches, prompts of {prompt}, {new} new, s; a step of the engine, ms",
        width=("width", "d"), engine=("engine", ".2f"), step=("a step, median", ".2f"), replayed=("from graphs", "d"),
        paged=("paged generate()", ".2f"), stock=("stock generate()", ".2f"), vllm=("vLLM 0.25.1", ".2f"), must=("must", ".1f"),
        aim=("aim", ".1f"), met=("met", ""), same=("same tokens as stock", ".0%"),
    )  # fmt: skip
    rows = bench.prompts(searches, prompt)
    calls = generate.Bench(
        argparse.Namespace(**{**vars(bench.options), "cache": {}, "rounds": 3}), bench.report, bench.model
    )
    for width in bench.options.widths:
        values: dict[str, Any] = {}
        with bench.report.surviving(f"beams of the engine, width {width}"):
            values, tokens = engine_beams(bench, rows, width, new)
        ids = torch.tensor(rows, device=bench.model.device)
        sides = calls.both(
            f"beams, width {width}",
            lambda paged, ids=ids, width=width: generate.beam_seconds(calls, paged, ids, width),
        )
        values |= {generate.NAMES[paged]: seconds for paged, (seconds, _) in sides.items()}
        if "engine" in values:
            values |= calls.bar(BEAM_BARS, width, values["engine"])
            if False in sides:
                values["same"] = (sides[False][1][:, prompt:].cpu() == tokens).float().mean().item()
        bench.report.row(width=width, **values)


def engine_beams(
    bench: Bench, rows: list[list[int]], width: int, new: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """What the engine needs for a search of each row, the median of three times, and its tokens [rows,
    new].
    """
    totals, steps = [], []
    with bench.engine(len(rows) * width, prefix_caching=False) as engine:
        for turn in range(5):
            bench.wait()
            begin = last = time.perf_counter()
            handles = [
                engine.submit(row, num_beams=width, max_new_tokens=new, do_sample=False) for row in rows
            ]
            while not all(handle.done for handle in handles):
                engine.step()
                now = time.perf_counter()
                steps += [now - last] if turn > 1 else []
                last = now
            totals.append(last - begin)
        replayed = engine.stats()["graphs"].get("replayed", 0)
    tokens = torch.tensor([handle.result().sequences[0].token_ids for handle in handles])
    return {
        "engine": statistics.median(totals[2:]),
        "step": statistics.median(steps) * 1e3,
        "replayed": replayed,
    }, tokens


BESIDE: dict[str, list[dict[str, Any]]] = {
    "nobody": [], "a beam search of width 4": [{"num_beams": 4}], "4 beam searches": [{"num_beams": 4}] * 4,
    "16 beam searches": [{"num_beams": 4}] * 16, "64 repetition penalties": [{"repetition_penalty": 1.1}] * 64,
    "a processor": [{"encoder_repetition_penalty": 1.3}], "8 processors": [{"encoder_repetition_penalty": 1.3}] * 8,
}  # fmt: skip


def beside(bench: Bench, rows: int = 64) -> None:
    """What others pay for those whose tokens must be heard of at once."""
    bench.report.table(
        "engine beside", f"A step of {rows} rows, context {CONTEXT}, some of them beams or with processors; the others plain",
        who=("beside plain requests", ""), median=("ms, median", ".2f"), worst=("ms, the slowest", ".2f"),
    )  # fmt: skip
    for who, others in BESIDE.items():
        with bench.report.surviving(f"beside, {who}"), bench.engine(rows) as engine:
            seconds = decode_steps(bench, engine, rows, 32, others=others)
            bench.report.row(who=who, median=statistics.median(seconds) * 1e3, worst=max(seconds) * 1e3)


def startup(bench: Bench) -> None:
    """One request on a new engine; what was compiled for the one before is not looked for again, but may lie
    in caches on the disk.
    """
    bench.report.table(
        "engine startup", "Seconds from Engine(model), weights loaded", compile=("compile", ""), ready=("engine made", ".1f"),
        first=("first token", ".1f"), replayed=("first replayed step", ".1f"), compiled=("compiled graphs", "d"),
    )  # fmt: skip
    for compile in (False, True):
        with bench.report.surviving(f"startup, compile={compile}"):
            bench.wait()
            begin = time.perf_counter()
            with bench.engine(8, compile=compile) as engine:
                found: dict[str, float] = {"ready": time.perf_counter() - begin}
                handle = engine.submit(bench.prompts(1, CONTEXT)[0], max_new_tokens=64, do_sample=False)
                for _ in handle:
                    found.setdefault("first", time.perf_counter() - begin)
                    if engine.stats()["graphs"].get("replayed"):
                        found.setdefault("replayed", time.perf_counter() - begin)
                bench.report.row(
                    compile=str(compile), compiled=engine.stats()["graphs"].get("compiled", 0), **found
                )


def profile(bench: Bench) -> None:
    rows = max(bench.options.rows)
    with bench.engine(rows) as engine:
        decode_steps(bench, engine, rows, 4)
        profiler = cProfile.Profile()
        profiler.enable()
        decode_steps(bench, engine, rows, 24)
        profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
    print(text.getvalue())


def host(bench: Bench) -> None:
    """What a step costs the host: it must grow with what happens, not with rows."""
    layers = SHAPES[bench.options.shape]["num_hidden_layers"]
    bench.report.table(
        "engine host", f"Work of the host in a decoding step that runs ahead, milliseconds: {layers} layers of next to no width",
        rows=("rows", "d"), driver=("steps are taken by", ""), whole=("median", ".3f"), mean=("mean", ".3f"),
        **{part: (part, ".3f") for part in (*PARTS, "rest")},
    )  # fmt: skip
    for rows in bench.options.rows:
        for driver in DRIVERS:
            with bench.report.surviving(f"host, {rows} rows"):
                bench.report.row(
                    rows=rows,
                    driver=driver,
                    **measure(layers, bench.options.device, rows, driver, **bench.options.engine),
                )


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "steps": steps,
    "trace": run_trace,
    "load": load,
    "shared": shared,
    "beams": beams,
    "beside": beside,
    "startup": startup,
    "host": host,
    "profile": profile,
}


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, SECTIONS, engine=True)
    parser.set_defaults(sections=["steps", "trace", "load", "shared", "beams", "beside"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256], help="of the steps")
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 8], help="of the beams")
    parser.add_argument("--trace", choices=TRACES, default="sharegpt")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--at-once", type=int, nargs="+", default=[256])
    parser.add_argument(
        "--warm-up",
        type=int,
        default=0,
        help="requests before anything is timed; as many as are timed if left out",
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[4.0, 16.0], help="requests a second, of the section load"
    )
    parser.add_argument("--shared", type=int, default=1024, help="tokens in common, of the section shared")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=["hf_paged", "transformers", "transformers, compiled", "vllm"],
        help="all that are installed, if left out",
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    report = report_of(options)
    bench: Any = Bench(options, report)
    report.run(SECTIONS, options.sections, bench)


if __name__ == "__main__":
    main()
