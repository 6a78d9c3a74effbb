"""The studies of the design's sources, replayed: block sizes, waste, swap against recompute, paged against
contiguous, sharing.

    python benchmarks/ablation.py --json results.jsonl     # on a GPU: the 8B shape
    OMP_NUM_THREADS=1 python benchmarks/ablation.py --shape tiny --rows 4 --context 64 --requests 12 --at-once 6
    OMP_NUM_THREADS=1 python benchmarks/ablation.py --sections waste sharing     # the books alone

blocks      milliseconds of a decoding step by block size, and how much of the blocks held is unused then
waste       slots that are held and unused, over all steps of a trace: the books alone (PagedAttention: under
            4 % at 16)
preemption  a trace in a pool that is too small, by block size and by what happens to those that must go
attention   one layer's decode attention on scattered pages against torch's on contiguous keys and values
sharing     blocks saved by samples, in closed form (`sharing.py --sections blocks` has the beams)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from admission import replay
from engine import Bench, decode_steps
from paged_kernels import graph_time
from shapes import SHAPES, common_parser, report_of
from sharing import PAPER, samples
from torch.nn import functional
from traces import TRACES, Ask, trace

from hf_paged import Engine
from hf_paged.blocks import BlockPool, BlockTable
from hf_paged.engine import EngineConfig
from hf_paged.kv import Layout, Pages, Seen
from hf_paged.kv.batch import RowBatch
from hf_paged.kv.store import Store
from hf_paged.scheduling import Scheduler


def accepted(mode: str) -> bool:
    """Whether the engine has this way to preempt."""
    try:
        EngineConfig(preemption=mode)
    except NotImplementedError:
        return False
    return True


MODES = [mode for mode in ("recompute", "swap", "auto") if accepted(mode)]


def in_blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def blocks(bench: Bench) -> None:
    rows, context = max(bench.options.rows), bench.options.context
    bench.report.table(
        "ablation blocks", f"A decoding step of {rows} rows, context {context}, by block size", size=("block size", "d"),
        median=("ms, median", ".2f"), worst=("ms, the slowest", ".2f"), waste=("unused slots", ".1%"), table=("blocks a row", "d"),
    )  # fmt: skip
    for size in bench.options.block_sizes:
        most = rows * (in_blocks(context + 64 * bench.options.steps, size) + 1)
        options = {"block_size": size, "num_blocks": most, "prefix_caching": False, **bench.options.engine}
        tokens = max(2048, rows)
        with (
            bench.report.surviving(f"block size {size}"),
            Engine(bench.model, max_batch_sequences=rows, max_batch_tokens=tokens, **options) as engine,
        ):
            unused: list[float] = []
            seconds = decode_steps(
                bench,
                engine,
                rows,
                bench.options.steps,
                context,
                lambda engine, to=unused: to.append(unused_share(engine.scheduler)),
            )
            bench.report.row(
                size=size, median=statistics.median(seconds) * 1e3, worst=max(seconds) * 1e3, waste=statistics.mean(unused),
                table=in_blocks(context, size),
            )  # fmt: skip


def unused_share(scheduler: Scheduler) -> float:
    """The share of the slots in held blocks that hold nothing (C2). Nobody shares a block here."""
    size = scheduler.kv_groups[0].pool.block_size
    tables = [sequence.tables[0] for group in scheduler.running for sequence in group.sequences]
    slots = size * sum(len(table.blocks) for table in tables)
    return 1 - sum(table.length - table.released * size for table in tables) / slots if slots else 0.0


def waste(bench: Bench) -> None:
    options = bench.options
    bench.report.table(
        "ablation waste", f"Unused slots of held blocks over a {options.trace} trace, up to {options.books_at_once} at once, books alone",
        size=("block size", "d"), mean=("mean", ".2%"), first=("first quarter", ".2%"), last=("last quarter", ".2%"),
        worst=("99th percentile", ".2%"), steps=("steps", "d"),
    )  # fmt: skip
    prompt, answer, _, longest = TRACES[options.trace]
    asks = trace(options.trace, options.books_requests, 1000)
    for size in options.block_sizes:
        room = max(
            2 * in_blocks(2 * longest, size),
            in_blocks(options.books_at_once * (prompt + answer), size) + options.books_at_once,
        )
        shares: list[float] = []
        replay(
            asks,
            longest,
            room,
            size,
            options.books_at_once,
            "watermark",
            lambda scheduler, to=shares: to.append(unused_share(scheduler)),
        )
        quarter, ranked = len(shares) // 4, sorted(shares)
        bench.report.row(
            size=size, mean=statistics.mean(shares), first=statistics.mean(shares[:quarter]), last=statistics.mean(shares[-quarter:]),
            worst=ranked[int(len(ranked) * 0.99)], steps=len(shares),
        )  # fmt: skip


def preemption(bench: Bench) -> None:
    options = bench.options
    prompt, answer, _, _ = TRACES[options.trace]
    asks = trace(options.trace, options.requests, SHAPES[options.shape]["vocab_size"])
    longest = max(len(ask.prompt) + ask.new for ask in asks)
    tokens = max(int(options.pressure * options.at_once * (prompt + answer)), longest + 512)
    bench.report.table(
        "ablation preemption",
        f"{len(asks)} requests of the {options.trace} trace, up to {options.at_once} at once, in a pool of "
        f"{tokens} tokens",
        size=("block size", "d"), mode=("preemption", ""), speed=("tok/s", ".0f"), share=("of recompute's", ".2f"),
        preemptions=("preemptions", "d"), swapped=("swapped", "d"), seconds=("s", ".1f"),
    )  # fmt: skip
    for size in options.block_sizes:
        base = None
        for mode in MODES:
            with bench.report.surviving(f"preemption={mode}, block size {size}"):
                speed, found = under_pressure(bench, asks, size, mode, in_blocks(tokens, size) + 1)
                base = base or speed
                bench.report.row(size=size, mode=mode, speed=speed, share=speed / base, **found)


def under_pressure(
    bench: Bench, asks: list[Ask], size: int, mode: str, room: int
) -> tuple[float, dict[str, Any]]:
    """Output tokens a second of a trace, and what the books did."""
    at_once = bench.options.at_once
    options = {
        "block_size": size,
        "preemption": mode,
        "num_blocks": room,
        "prefix_caching": False,
        **bench.options.engine,
    }
    with Engine(
        bench.model, max_batch_sequences=at_once, max_batch_tokens=max(2048, at_once), **options
    ) as engine:
        engine.generate(
            [ask.prompt for ask in asks[: min(4, len(asks))]],
            max_new_tokens=8,
            do_sample=False,
            progress=False,
        )
        before = dict(engine.scheduler.counts)
        bench.wait()
        begin = time.monotonic()
        handles = [engine.submit(ask.prompt, max_new_tokens=ask.new, do_sample=False) for ask in asks]
        while not all(handle.done for handle in handles):
            engine.step()
        bench.wait()
        seconds = time.monotonic() - begin
        new = sum(len(handle.result().sequences[0].token_ids) for handle in handles)
        counts = engine.scheduler.counts
        found = {
            name: counts[key] - before.get(key, 0)
            for name, key in (("preemptions", "preemptions"), ("swapped", "swapped_out"))
        }
        return new / seconds, {**found, "seconds": seconds}


def attention(bench: Bench) -> None:
    rows, context = max(bench.options.rows), bench.options.context
    config = bench.model.config
    dim = config.hidden_size // config.num_attention_heads
    bench.report.table(
        "ablation attention", f"Decode attention of one layer, {rows} rows, context {context}, {config.num_attention_heads}/"
        f"{config.num_key_value_heads} heads of {dim}", size=("block size", "d"), paged=("paged, us", ".1f"),
        dense=("contiguous, us", ".1f"), share=("paged / contiguous", ".2f"), apart=("largest difference", ".1e"),
    )  # fmt: skip
    make = {"device": bench.model.device, "dtype": bench.model.dtype}
    keys, values = (torch.randn(rows, config.num_key_value_heads, context, dim, **make) for _ in range(2))
    query = torch.randn(rows, config.num_attention_heads, 1, dim, **make)

    def dense() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    contiguous = microseconds(bench, dense)
    for size in bench.options.block_sizes:
        with bench.report.surviving(f"attention, block size {size}"):
            pages = scattered(keys, values, size)
            seen = Seen(0, causal=True)
            paged = microseconds(bench, lambda pages=pages, seen=seen: pages.ops.attend(query, pages, seen))
            apart = (
                (pages.ops.attend(query, pages, seen)[:, 0].float() - dense()[:, :, 0].float())
                .abs()
                .max()
                .item()
            )
            bench.report.row(size=size, paged=paged, dense=contiguous, share=paged / contiguous, apart=apart)


def scattered(keys: torch.Tensor, values: torch.Tensor, size: int) -> Pages:
    """Keys and values [rows, heads, context, dim] on pages of which no two of a row lie side by side."""
    rows, _, context, _ = keys.shape
    count = in_blocks(context, size)
    pool = BlockPool(2 * rows * count, size)
    taken = [BlockTable(pool, near=place) for place in range(0, pool.total, 2)]
    for table in taken:
        table.append(1)
    tables = [BlockTable(pool) for _ in range(rows)]
    for _ in range(count):
        for table in tables:
            table.append(min(size, context - table.length))
    store = Store(Layout.of(keys, values), 1, pool.total, size)
    whole = RowBatch(tables, None, context, context, None, lambda: True)
    ops = store.captured if keys.is_cuda else store.ops  # on a card it is the kernels that are compared
    store.ops.write(Pages(*store.of_layer[0], whole, store.ops), keys, values)
    return Pages(*store.of_layer[0], RowBatch(tables, None, context, 1, None, lambda: True), ops)


def microseconds(bench: Bench, call: Callable[[], object], times: int = 30) -> float:
    """Of one call; on a CUDA device without what launching it costs the host."""
    for _ in range(3):
        call()
    if bench.model.device.type == "cuda":
        return graph_time([call] * times)
    found = []
    for _ in range(5):
        bench.wait()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        bench.wait()
        found.append((time.perf_counter() - begin) / times)
    return min(found) * 1e6


def sharing(bench: Bench) -> None:
    bench.report.table(
        "ablation sharing", "Blocks of 16 saved by samples of one prompt, by the books and by the closed form", trace=("trace", ""),
        width=("samples", "d"), booked=("by the books", ".1%"), closed=("closed form", ".1%"), paper=("the paper, 2 to 6", ""),
    )  # fmt: skip
    for name in TRACES:
        for width in (2, 4, 6):
            booked, closed = samples(name, width, 500)
            bench.report.row(
                trace=name, width=width, booked=booked, closed=closed, paper=PAPER["samples", name]
            )


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "blocks": blocks,
    "waste": waste,
    "preemption": preemption,
    "attention": attention,
    "sharing": sharing,
}


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, SECTIONS, engine=True)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--rows", type=int, nargs="+", default=[64], help="of the steps; the largest counts")
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--steps", type=int, default=16, help="decoding steps that are timed")
    parser.add_argument("--trace", choices=TRACES, default="sharegpt")
    parser.add_argument("--requests", type=int, default=256, help="of the trace under pressure")
    parser.add_argument("--at-once", type=int, default=128)
    parser.add_argument(
        "--pressure",
        type=float,
        default=0.2,
        help="the pool, as a share of what so many requests hold in the end",
    )
    parser.add_argument(
        "--books-requests", type=int, default=400, help="of the trace that only the books see"
    )
    parser.add_argument("--books-at-once", type=int, default=64)
    return parser.parse_args()


def main() -> None:
    options = parse()
    report = report_of(options)
    bench: Any = Bench(options, report)
    report.run(SECTIONS, options.sections, bench)


if __name__ == "__main__":
    main()
