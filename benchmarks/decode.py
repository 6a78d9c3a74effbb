"""One decoding step of generate(), stock against paged, on whatever device there is.

    OMP_NUM_THREADS=1 python benchmarks/decode.py             # the table of docs/benchmarks.md
    python benchmarks/decode.py --rows 8 --contexts 512       # a part of it
    python benchmarks/decode.py --kernels torch native        # the paged cache twice, read in two ways

All caches are filled with the same random keys and values, then stock generate() decodes on them. Their steps
alternate in rounds within one process; a step's time is the time between two calls of the logits processor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from shapes import SHAPES, build, line, where
from transformers import DynamicCache, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import hf_paged

SECONDS = 10
"""How long a cell is measured at least."""


class Clock(LogitsProcessor):
    """Notes when each step has its logits."""

    def __init__(self, device: torch.device, now: Callable[[], float]) -> None:
        self.device, self.now, self.times = device, now, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(self.now())
        return scores

    @property
    def steps(self) -> list[float]:
        # The first step after a fill also touches memory for the first time.
        return [late - early for early, late in zip(self.times[1:], self.times[2:], strict=False)]


def filled(model: LlamaForCausalLM, kernels: str | None, rows: int, context: int, new: int) -> DynamicCache:
    """A cache that has seen `context` random tokens in every row: stock's, or a paged one read by
    `kernels`.
    """
    config = model.config
    cache = DynamicCache(config=config) if kernels is None else hf_paged.PagedCache(model, kernels=kernels)
    if kernels is not None:
        cache.sequences.expect(context + new)
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    random = torch.Generator(model.device).manual_seed(0)
    for layer in range(config.num_hidden_layers):
        shape = (rows, heads, context, dim)
        keys, values = (
            torch.randn(shape, generator=random, device=model.device, dtype=model.dtype) for _ in "kv"
        )
        cache.update(keys, values, layer)
    return cache


def steps(
    model: LlamaForCausalLM,
    kernels: str | None,
    rows: int,
    context: int,
    new: int,
    now: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each decoding step."""
    clock = Clock(model.device, now)
    ids = torch.randint(
        10,
        1000,
        (rows, context + 1),
        device=model.device,
        generator=torch.Generator(model.device).manual_seed(1),
    )
    with torch.no_grad():
        cache = filled(model, kernels, rows, context, new)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new, min_new_tokens=new, do_sample=False,
        logits_processor=LogitsProcessorList([clock]),
    )  # fmt: skip
    return clock.steps


def cell(
    model: LlamaForCausalLM, ways: list[str | None], rows: int, context: int, options: argparse.Namespace
) -> list[float]:
    """Median milliseconds of a step in each of the ways; short steps get more rounds, so that noise of the
    machine meets all.
    """
    times: dict[str | None, list[float]] = {way: [] for way in ways}
    now = time.thread_time if options.processor_time else time.perf_counter
    begin = time.perf_counter()
    for turn in range(10 * options.rounds + 1):
        for way in ways if turn % 2 else ways[::-1]:
            measured = steps(model, way, rows, context, options.new, now)
            if turn:
                times[way] += measured
        if turn >= options.rounds and time.perf_counter() - begin > SECONDS * len(ways) / 2:
            break
    return [statistics.median(times[way]) * 1e3 for way in ways]


def beam_searches(
    model: LlamaForCausalLM, ways: list[str | None], dtype: str, now: Callable[[], float]
) -> None:
    """Seconds of 16 beam searches of width 4 and 8 over prompts of 256 tokens, 64 new, warm."""
    ids = torch.randint(
        10, 1000, (16, 256), device=model.device, generator=torch.Generator(model.device).manual_seed(1)
    )
    length = {"max_new_tokens": 64, "min_new_tokens": 64}
    for width in (4, 8):
        seconds = []
        for way in ways:
            word = {} if way is None else {"cache_implementation": "paged", "cache_config": {"kernels": way}}
            for _ in range(2):
                begin = now()
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    num_beams=width,
                    do_sample=False,
                    **length,
                    **word,
                )
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
                took = now() - begin
            seconds.append(took)
        ratios = [paged / seconds[0] for paged in seconds[1:]]
        numbers = [*(f"{took:.2f} s" for took in seconds), *(f"{ratio:.2f}" for ratio in ratios)]
        print("|", " | ".join([dtype, f"16 x {width} beams", "256 + 64", *numbers]), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument(
        "--kernels", nargs="*", default=["auto"], help="what reads the pages; several are compared"
    )
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count this thread's processor time: for one thread on a machine that others use",
    )
    parser.add_argument(
        "--beams", action="store_true", help="also 16 beam searches of widths 4 and 8, 256 + 64 tokens"
    )
    options = parser.parse_args()
    print(line(where(options.device)))
    names = ["paged"] if len(options.kernels) == 1 else options.kernels
    columns = [
        "dtype",
        "rows",
        "context",
        "stock ms",
        *(f"{name} ms" for name in names),
        *(f"{name} / stock" for name in names),
    ]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    worst = dict.fromkeys(names, 0.0)
    for dtype in options.dtypes:
        model = build(options.shape, options.device, getattr(torch, dtype))
        for rows in options.rows:
            for context in options.contexts:
                times = cell(model, [None, *options.kernels], rows, context, options)
                ratios = [paged / times[0] for paged in times[1:]]
                worst = {name: max(worst[name], ratio) for name, ratio in zip(names, ratios, strict=True)}
                print(
                    "|",
                    " | ".join(
                        [dtype, str(rows), str(context), *(f"{number:.2f}" for number in times + ratios)]
                    ),
                    "|",
                    flush=True,
                )
                hf_paged.release(model)
        if options.beams:
            beam_searches(
                model,
                [None, *options.kernels],
                dtype,
                time.thread_time if options.processor_time else time.perf_counter,
            )
    print("worst ratio", ", ".join(f"{name} {ratio:.2f}" for name, ratio in worst.items()))


if __name__ == "__main__":
    main()
