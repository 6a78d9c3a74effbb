"""Where the time goes: of a trace by kinds of steps, and of one decoding step on the device by kernels. What
the host does is in `engine.py --sections host`.

    # on a GPU: the 8B shape
    python benchmarks/anatomy.py --rows 256 --requests 512 --at-once 256 [--adapters 32]
    # on any CPU
    OMP_NUM_THREADS=1 python benchmarks/anatomy.py --shape tiny --rows 8 --requests 12 --at-once 4

kinds    steps of a trace that were replayed and that were not, with and without prompts in them
device   one decoding step of the engine: what each kind of kernel costs the device
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from adapters import AdapterBench, adapter_of
from engine import decode_steps
from peers import waits
from shapes import SHAPES, common_parser, report_of
from traces import TRACES, Ask, trace

from hf_paged import Engine

KINDS = {
    "sums of ranks": ("_reduce_norm", "all_reduce", "nccl"),
    "attention": ("_decode", "_merge", "_plan", "_prefill", "flash", "fmha"), "writing keys and values": ("write",), "rotary": ("rotary",),
    "norms": ("norm", "rsqrt"), "gate": ("swiglu", "silu"),
    "adapters": ("_shrink", "_expand", "_sort"),
    "products": ("gemm", "nvjet", "cutlass", "gemv", "splitkreduce", "matmul", "cublas"),
    "choosing": ("argmax", "reduce", "topk", "sort"), "copies": ("memcpy", "copy"),
}  # fmt: skip


def kinds(bench: AdapterBench) -> None:
    options = bench.options
    asks = trace(options.trace, options.requests, SHAPES[options.shape]["vocab_size"])
    with bench.engine_with(options.adapters, options.at_once) as engine:
        warm_up = options.warm_up or len(asks)
        submit(engine, trace(options.trace, warm_up, SHAPES[options.shape]["vocab_size"], seed=1), options)
        while engine.driver.books.jobs:
            engine.step()
        bench.wait()
        begin = time.perf_counter()
        submit(engine, asks, options)
        asked = time.perf_counter() - begin
        collections: list[float] = []
        gc.callbacks.append(clock := collector_clock(collections))
        steps = watched(engine)
        gc.callbacks.remove(clock)
    whole = sum(seconds for seconds, *_ in steps)
    bench.report.table(
        "anatomy kinds", f"{options.requests} requests of the {options.trace} trace, up to {options.at_once} at once, by kinds of steps; "
        f"submitting took {asked:.2f} s, the steps {whole:.2f} s, "
        f"{len(collections)} runs of Python's garbage collector {sum(collections):.2f} s",
        kind=("steps", ""), count=("how many", "d"), seconds=("s", ".2f"), median=("ms, median", ".2f"), worst=("ms, the slowest", ".2f"),
        tokens=("tokens a step", ".0f"), waited=("of it waiting for the device", ".0%"),
    )  # fmt: skip
    found = defaultdict(list)
    for seconds, waited, rows, tokens, replayed in steps:
        found[
            ("replayed" if replayed else "not replayed") + (", with prompts" if tokens > rows else "")
        ].append((seconds, waited, tokens))
    for kind, of_kind in sorted(found.items()):
        times = [seconds for seconds, _, _ in of_kind]
        bench.report.row(
            kind=kind, count=len(times), seconds=sum(times), median=statistics.median(times) * 1e3, worst=max(times) * 1e3,
            tokens=sum(tokens for _, _, tokens in of_kind) / len(times), waited=sum(waited for _, waited, _ in of_kind) / sum(times),
        )  # fmt: skip


def submit(engine: Engine, asks: Sequence[Ask], options: argparse.Namespace) -> None:
    for i, ask in enumerate(asks):
        adapter = adapter_of(i, options.adapters)
        engine.submit(ask.prompt, max_new_tokens=ask.new, do_sample=False, adapter=adapter)


def collector_clock(seconds: list[float]) -> Callable[[str, dict[str, int]], None]:
    """What the garbage collector calls, to note how long it takes."""
    begin = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal begin
        if phase == "start":
            begin = time.perf_counter()
        else:
            seconds.append(time.perf_counter() - begin)

    return note


def watched(engine: Engine) -> list[tuple[float, float, int, int, bool]]:
    """All steps until nobody is left: seconds, of them waiting for the device, rows, tokens, whether
    replayed.
    """
    steps, plans = [], []
    schedule = engine.scheduler.schedule

    def noted() -> Any:
        plans.append(schedule())
        return plans[-1]

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    try:
        with waits(engine.model.device) as waited:
            while engine.driver.books.jobs:
                replayed = engine.stats()["graphs"].get("replayed", 0)
                plans.clear()
                waited.clear()
                begin = time.perf_counter()
                engine.step()
                seconds = time.perf_counter() - begin
                rows = sum(len(plan.rows) for plan in plans)
                tokens = sum(plan.tokens for plan in plans)
                steps.append(
                    (
                        seconds,
                        sum(waited),
                        rows,
                        tokens,
                        engine.stats()["graphs"].get("replayed", 0) > replayed,
                    )
                )
    finally:
        del engine.scheduler.schedule  # type: ignore[method-assign]
    return steps


def device(bench: AdapterBench) -> None:
    if bench.model.device.type != "cuda":
        print("\nthe section device needs a CUDA device")
        return
    for rows in bench.options.rows:
        with bench.engine_with(bench.options.adapters, rows) as engine:
            others = [{"adapter": adapter_of(row, bench.options.adapters)} for row in range(rows)]
            decode_steps(bench, engine, rows, 8, others=others)
            count = 8
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                seconds = decode_steps(bench, engine, rows, count, others=others)
                bench.wait()
        events = last_of(kernels_of(profiler), sum(seconds) * 1e6)
        spent = by_kind(events)
        bench.report.table(
            "anatomy device", f"The kernels of a decoding step of {rows} rows: {sum(seconds) / count * 1e3:.2f} ms by the clock, profiled",
            kind=("kernels", ""), cost=("ms a step", ".3f"), share=("of the kernels", ".1%"),
        )  # fmt: skip
        whole = sum(spent.values())
        for kind, cost in spent.most_common():
            bench.report.row(kind=kind, cost=cost / 1e3 / count, share=cost / whole)
        other = Counter()
        for event in events:
            if kind_of(event.name) == "other":
                other[event.name[:90]] += event.time_range.elapsed_us()
        print(
            "other:", *(f"{name} {cost / 1e3 / count:.3f}" for name, cost in other.most_common(6)), sep="\n  "
        )


def kernels_of(profiler: torch.profiler.profile) -> list[Any]:
    """The events of a device."""
    return [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def by_kind(events: Sequence[Any]) -> Counter[str]:
    """The microseconds of every kind of kernels."""
    spent: Counter[str] = Counter()
    for event in events:
        spent[kind_of(event.name)] += event.time_range.elapsed_us()
    return spent


def last_of(events: list[Any], microseconds: float) -> list[Any]:
    """The events of the last so many microseconds."""
    end = max(event.time_range.end for event in events)
    return [event for event in events if event.time_range.start >= end - microseconds]


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


SECTIONS: dict[str, Callable[[AdapterBench], None]] = {"kinds": kinds, "device": device}


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, SECTIONS, engine=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[256], help="of the steps")
    parser.add_argument("--adapters", type=int, default=0, help="that requests have in turn")
    parser.add_argument("--trace", choices=TRACES, default="sharegpt")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=0,
        help="requests before anything is timed; as many as are timed if left out",
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    report = report_of(options)
    report.run(SECTIONS, options.sections, AdapterBench(options, report))


if __name__ == "__main__":
    main()
