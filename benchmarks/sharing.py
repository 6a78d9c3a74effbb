"""What sharing saves, in time and in memory: steps, engine and generate() with shared_reads="auto" and "off" by turns.

    python benchmarks/sharing.py --json results.jsonl    # every section
    python benchmarks/sharing.py --sections kernel samples
    OMP_NUM_THREADS=1 python benchmarks/sharing.py --shape tiny    # does it run? on any CPU
    OMP_NUM_THREADS=1 python benchmarks/sharing.py --sections blocks    # needs no GPU

kernel    decode attention of one layer, 512 rows in 32 groups, 4,096 common tokens and 256 of their own
nothing   steps of rows that share nothing: at most 1.02 of those without groups
samples   output tokens a second, 64 prompts of 512 tokens with 8 samples of 512, and 32 of 4,096 with 16
system    512 requests behind 2,048 common tokens, 128 of their own, 256 new, 256 at once
beams     generate(): 16 prompts of 2,048 tokens with 8 beams, a step of 16 greedy rows beside
answers   output tokens a second by samples of one prompt, 1 to 64: stock generate(), on pages, and the engine
ended     rows that leave generate() when they end, the cases of `ended_rows.py`
blocks    blocks saved beside the PagedAttention paper's ranges (arXiv 2309.06180, section 6.3): blocks saved / blocks
          without sharing. Samples: the books over lognormal length traces with the paper's means, which must agree with
          the closed form. Beams: searches of the embedded model at those lengths, counted at every step
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import ended_rows
import torch
from shapes import Report, build, common_parser, report_of
from transformers import LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged import Engine, demo
from hf_paged.blocks import BlockPool, BlockTable, append

WAYS = ("off", "auto")
TILINGS = [(64, 64, 4, 3, 2), (64, 64, 4, 3, 4), (128, 64, 8, 3, 1), (128, 64, 4, 3, 2), (64, 128, 4, 2, 2)]
"""Tiles of the common part: query rows, tokens, warps, stages, programs of a multiprocessor."""
CASES = [
    (16, 32, 4096, 256), (8, 64, 512, 256), (256, 1, 2048, 256), (8, 16, 2048, 32), (64, 1, 4096, 512),
    (1, 256, 0, 2304), (1, 64, 0, 4096),
]  # fmt: skip
"""Of decode attention alone: members of a group, groups, common tokens and those of each row; the last share nothing."""
BLOCK = 16
MEANS = {"alpaca": (19, 58, 0.8, 512), "sharegpt": (161, 338, 1.0, 1024)}
"""Mean prompt, mean output, sigma of the logarithm, cap: the paper's figure 11."""
PAPER = {
    ("samples", "alpaca"): "6.1-9.8 %",
    ("samples", "sharegpt"): "16.2-30.5 %",
    ("beams", "alpaca"): "37.6-55.2 %",
    ("beams", "sharegpt"): "44.3-66.3 %",
}


class Bench:
    """One model, and requests to it."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report = options, report
        self.scale = 1 if options.shape != "tiny" else 32
        """By how much cases are smaller."""
        self.model: Any = build(options.shape, options.device, getattr(torch, options.dtype))
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.on_gpu = self.model.device.type == "cuda"
        self._seed = 0

    def prompt(self, tokens: int) -> list[int]:
        """Other random ids at every call."""
        self._seed += 1
        random = torch.Generator().manual_seed(self._seed)
        return torch.randint(10, 1000, (tokens,), generator=random).tolist()

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any]) -> float:
        self.synchronize()
        begin = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - begin

    @staticmethod
    def most_blocks(engine: Engine, handles: list[Any]) -> int:
        """The most blocks that requests hold while they run to their ends."""
        most = 0
        while not all(handle.done for handle in handles):
            engine.step()
            most = max(most, sum(kind["held"] for kind in engine.stats()["blocks"].values()))
        return most

    def both(
        self, make: Callable[[], list[tuple[list[int], dict[str, Any]]]], **options: Any
    ) -> dict[str, float]:
        """Output tokens a second of requests by way, of the second run with captured steps."""
        found = {}
        for way in WAYS:
            with Engine(self.model, shared_reads=way, **options) as engine:
                handles = [engine.submit(prompt, **keywords) for prompt, keywords in make()]
                found["blocks"] = self.most_blocks(engine, handles)
                requests = make()
                handles = [engine.submit(prompt, **keywords) for prompt, keywords in requests]
                tokens = sum(
                    each.get("num_return_sequences", 1) * each["max_new_tokens"] for _, each in requests
                )
                seconds = self.seconds(lambda handles=handles: [handle.result() for handle in handles])
                found[way] = tokens / seconds
                found[f"{way} unread"] = engine.stats()["shared_reads"].get("tokens_unread", 0)
            hf_paged.release(self.model)
        return found


def samples(bench: Bench) -> None:
    """Samples of prompts."""
    table(bench, "samples", "Samples, output tokens a second")
    for prompts, tokens, count, new in ((64, 512, 8, 512), (32, 4096, 16, 512)):
        tokens, new = tokens // bench.scale, new // bench.scale
        if bench.options.quick:
            new //= 4
        keywords = {
            "num_return_sequences": count,
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 0,
            "max_new_tokens": new,
        }
        found = bench.both(
            lambda prompts=prompts, tokens=tokens, keywords=keywords: [
                (bench.prompt(tokens), keywords) for _ in range(prompts)
            ],
            max_batch_sequences=512,
        )
        row(bench, "samples", f"{prompts} x {tokens} x {count} x {new} new", found)


def system(bench: Bench) -> None:
    """Requests behind a system prompt."""
    table(bench, "system", "Requests behind one system prompt, output tokens a second")
    common = bench.prompt(2048 // bench.scale)
    new = 256 // bench.scale
    found = bench.both(
        lambda: [(common + bench.prompt(128 // bench.scale), {"max_new_tokens": new}) for _ in range(512)]
    )
    row(bench, "system", f"512 x ({len(common)} + {128 // bench.scale}) x {new} new", found)


def table(bench: Bench, name: str, title: str) -> None:
    bench.report.table(
        name, title, case=("case", ""), off=("each its own", ",.0f"), auto=("common once", ",.0f"),
        ratio=("of it", ".2f"), unread=("tokens not read again, millions", ",.1f"),
        blocks=("blocks at most", ","),
    )  # fmt: skip


def row(bench: Bench, name: str, case: str, found: dict[str, float]) -> None:
    ratio = found["auto"] / found["off"]
    unread = found["auto unread"] / 1e6
    bench.report.row(
        case=case, off=found["off"], auto=found["auto"], ratio=ratio, unread=unread, blocks=found["blocks"]
    )


def nothing(bench: Bench) -> None:
    """Steps of rows that share nothing, in turns."""
    bench.report.table(
        "nothing", "Steps that share nothing, ms, medians", rows=("rows", ""), off=("without groups", ".2f"),
        auto=("with", ".2f"), ratio=("of it", ".3f"),
    )  # fmt: skip
    for rows in (1, 8, 64, 256):
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(3):
            for way in WAYS:
                with Engine(bench.model, shared_reads=way, max_batch_tokens=4096) as engine:
                    tokens, new = 384 // bench.scale, 96
                    handles = [engine.submit(bench.prompt(tokens), max_new_tokens=new) for _ in range(rows)]
                    while engine.stats()["waiting"]:
                        engine.step()
                    for _ in range(24):
                        engine.step()
                    times = [
                        bench.seconds(lambda engine=engine: [engine.step() for _ in range(8)]) / 8
                        for _ in range(5)
                    ]
                    found[way].append(statistics.median(times) * 1e3)
                    for handle in handles:
                        handle.cancel()
        off, auto = (statistics.median(found[way]) for way in WAYS)
        bench.report.row(rows=rows, off=off, auto=auto, ratio=auto / off)


def beams(bench: Bench) -> None:
    """A step of beams beside one of greedy rows."""
    bench.report.table(
        "beams", "generate(), 16 prompts of 2,048 tokens, ms a token", way=("way", ""), greedy=("16 rows", ".2f"),
        beams=("8 beams each", ".2f"), ratio=("of it", ".2f"),
    )  # fmt: skip
    tokens, new = 2048 // bench.scale, 64 // (1 if bench.on_gpu else 8)
    ids = torch.tensor([bench.prompt(tokens) for _ in range(16)], device=bench.model.device)
    for way in WAYS:
        found = []
        for width in (1, 8):
            options = {"num_beams": width, "do_sample": False, "cache_implementation": "paged"}

            def call(count: int, options: dict[str, Any] = options, way: str = way) -> None:
                bench.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                    cache_config={"shared_reads": way}, **options,
                )  # fmt: skip

            call(new)
            short = bench.seconds(lambda: call(2))
            found.append((bench.seconds(lambda: call(new)) - short) / (new - 2) * 1e3)
        bench.report.row(way=way, greedy=found[0], beams=found[1], ratio=found[1] / found[0])
        hf_paged.release(bench.model)


def kernel(bench: Bench) -> None:
    """Decode attention alone."""
    if not bench.on_gpu:
        return
    import hf_paged_kernels as kernels
    from hf_paged.blocks import SharedReads

    bench.report.table(
        "kernel", "Decode attention of one layer, us", case=("case", ""), off=("each its own", ".0f"),
        late=("common once, one after the other", ".0f"), auto=("beside", ".0f"), tile=("tile, of them: rows, tokens, warps, stages, programs", ""),
    )  # fmt: skip
    heads, group, dim, block = 8, 4, 128, 16
    for members, groups, common, own in CASES:
        rows = members * groups
        shared_blocks, own_blocks = common // block, own // block
        total = groups * shared_blocks + rows * own_blocks
        keys, values = (
            torch.randn(total, block, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        ids = torch.randperm(total, device="cuda", dtype=torch.int32).cpu()
        table = torch.empty(rows, shared_blocks + own_blocks, dtype=torch.int32)
        for i in range(groups):
            mine = slice(i * members, (i + 1) * members)
            table[mine, :shared_blocks] = ids[i * shared_blocks : (i + 1) * shared_blocks]
        table[:, shared_blocks:] = ids[groups * shared_blocks :].view(rows, own_blocks)
        lists = table.tolist()
        books = SharedReads(block)
        numbers = books.follow(
            range(rows), [common + own] * rows, lambda row, count, lists=lists: lists[row][:count], ()
        )
        found = torch.tensor(numbers, dtype=torch.int32, device="cuda").view(rows, 8)
        table = table.cuda()
        query = torch.randn(rows, heads * group, dim, device="cuda", dtype=torch.bfloat16)
        lengths = torch.full((rows,), common + own, dtype=torch.int32, device="cuda")
        times: dict[tuple[str, bool], float] = {}
        answers = {}
        tilings = {
            "own": None,
            **{", ".join(map(str, each)): kernels.tuning.Tiling(*each) for each in TILINGS},
        }
        for name, tiling in tilings.items():
            for beside in (True,) if name == "own" else (False, True):
                plan = kernels.Plan(
                    query, keys, values, mean_length=common + own, shared=name != "own", shared_tiling=tiling
                )
                if plan.shared is not None:
                    plan.shared.early &= beside
                plan.update(lengths, groups=found if name != "own" else None)
                answers[name] = kernels.decode(query, keys, values, table, plan)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(10):
                        kernels.decode(query, keys, values, table, plan)
                graph.replay()
                times[name, beside] = statistics.median(bench.seconds(graph.replay) for _ in range(5)) * 1e5
                error = (answers[name] - answers["own"]).abs().max()
                assert error < 0.02, error
        for name in list(tilings)[1:]:
            bench.report.row(
                case=f"{groups} groups of {members}, {common} + {own}", off=times["own", True],
                late=times[name, False], auto=times[name, True], tile=name,
            )  # fmt: skip


def lengths(trace: str, count: int) -> list[tuple[int, int]]:
    """Prompt and output lengths of `count` requests."""
    prompt, output, sigma, cap = MEANS[trace]
    rng = random.Random(0)

    def draw(mean: int) -> int:
        return min(cap, max(4, int(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))

    return [(draw(prompt), draw(output)) for _ in range(count)]


def samples_saved(trace: str, width: int, requests: int = 2000) -> tuple[float, float]:
    """Saved by `width` samples of each prompt when they end: by the books, and by the closed form."""
    booked = closed = alone = 0
    for prompt, output in lengths(trace, requests):
        whole = -(-(prompt + output) // BLOCK)
        pool = BlockPool(width * whole + width, BLOCK)
        first = BlockTable(pool)
        append([first], [prompt])
        rows = [first, *(first.fork() for _ in range(width - 1))]
        for _ in range(output):
            append(rows, [1] * width)
        alone += width * whole
        booked += width * whole - pool.held
        closed += (width - 1) * (prompt // BLOCK)
        pool.check()
    return booked / alone, closed / alone


class Count(LogitsProcessor):
    """Counts blocks at every step of a search: those held, and those that rows of their own would hold."""

    def __init__(self, group: Any) -> None:
        self.group, self.held, self.alone = group, 0, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        pool = self.group.pool
        self.held += pool.held
        self.alone += input_ids.shape[0] * pool.blocks_for(input_ids.shape[1])
        return scores


def beams_saved(trace: str, width: int, requests: int) -> float:
    """Saved by beam searches of the embedded model, over all their steps."""
    model, tokenizer = demo.model(), demo.tokenizer()
    story = torch.tensor([token for prompt in demo.prompts() * 40 for token in tokenizer(prompt).input_ids])
    held = alone = 0
    for prompt, output in lengths(trace, requests):
        room = model.config.max_position_embeddings
        prompt, output = min(prompt, room // 2), min(output, room // 2)
        ids = story[None, :prompt]
        cache = hf_paged.PagedCache(model, block_size=BLOCK)
        count = Count(next(iter(cache.sequences.rows.values())).group)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            past_key_values=cache,
            logits_processor=LogitsProcessorList([count]),
        )
        held, alone = held + count.held, alone + count.alone
        del cache
    return 1 - held / alone


def blocks(bench: Bench) -> None:
    """Blocks saved beside the paper's ranges."""
    widths = {f"width {width}": width for width in (2, 4, 6)}
    bench.report.table(
        "blocks", f"Blocks saved, of {BLOCK} tokens", what=("what", ""), trace=("trace", ""),
        **{name: (name, ".1%") for name in widths}, paper=("the paper, widths 2 to 6", ""),
    )  # fmt: skip
    for trace in MEANS:
        found = [samples_saved(trace, width) for width in widths.values()]
        assert all(abs(booked - closed) < 1e-12 for booked, closed in found), (
            "the books and the closed form disagree"
        )
        saved = dict(zip(widths, (booked for booked, _ in found), strict=True))
        bench.report.row(what="samples", trace=trace, paper=PAPER["samples", trace], **saved)
    for trace in MEANS:
        saved = {name: beams_saved(trace, width, bench.options.requests) for name, width in widths.items()}
        bench.report.row(what="beams", trace=trace, paper=PAPER["beams", trace], **saved)


def answers(bench: Bench) -> None:
    """Samples of one prompt by stock, on pages and in the engine."""
    bench.report.table(
        "answers", "Samples of one prompt, output tokens a second", count=("samples", ""), stock=("stock", ",.0f"),
        paged=("paged generate()", ",.0f"), engine=("engine", ",.0f"), ratio=("engine of stock", ".2f"),
        blocks=("blocks", ""), apart=("of rows apart", ""),
    )  # fmt: skip
    new = 256 // bench.scale
    for count in bench.options.counts:
        ids = torch.tensor([bench.prompt(2048 // bench.scale)], device=bench.model.device)
        keywords = {
            "num_return_sequences": count, "do_sample": True, "top_k": 0, "max_new_tokens": new,
            "min_new_tokens": new,
        }  # fmt: skip
        seconds = {}
        for name, word in (("stock", {}), ("paged", {"cache_implementation": "paged"})):

            def call(
                word: dict[str, Any] = word, ids: Any = ids, keywords: dict[str, Any] = keywords
            ) -> None:
                bench.model.generate(ids, attention_mask=torch.ones_like(ids), **keywords, **word)

            call()
            seconds[name] = bench.seconds(call)
        hf_paged.release(bench.model)
        with Engine(bench.model) as engine:
            handles = [engine.submit(ids[0].tolist(), **keywords)]
            held = bench.most_blocks(engine, handles)
            handle = engine.submit(bench.prompt(ids.shape[1]), **keywords)
            seconds["engine"] = bench.seconds(handle.result)
            apart = count * -(-(ids.shape[1] + new) // engine.config.block_size)
        hf_paged.release(bench.model)
        rates = {name: count * new / each for name, each in seconds.items()}
        bench.report.row(
            count=count, **rates, ratio=rates["engine"] / rates["stock"], blocks=held, apart=apart
        )


def ended(bench: Bench) -> None:
    """Rows that leave generate() when they end."""
    ended_rows.run(bench.options, bench.report, ended_rows.CASES)


SECTIONS = {
    "kernel": kernel,
    "nothing": nothing,
    "samples": samples,
    "system": system,
    "beams": beams,
    "answers": answers,
    "ended": ended,
    "blocks": blocks,
}


def main() -> None:
    parser = common_parser(__doc__, SECTIONS)
    parser.add_argument("--quick", action="store_true", help="a quarter of the new tokens of samples")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="of answers")
    parser.add_argument("--requests", type=int, default=12, help="of blocks: beam searches a trace and width")
    ended_rows.add_options(parser)
    options = parser.parse_args()
    report = report_of(options)
    report.run(SECTIONS, options.sections, Bench(options, report))


if __name__ == "__main__":
    main()
