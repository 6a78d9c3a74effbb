"""A step of a hybrid (Qwen3.5's shape of 8B, random weights, bf16) in stock and paged generate(), and the engine.

python benchmarks/hybrid.py [--rows 1 8 64] [--layers 32] [--stock] [--engine 1 8 64 256] [--prefixes]
    [--prompts 64]

Beam searches: benchmarks/generate.py --sections beams --shape qwen8b. Training: benchmarks/grpo.py --shape qwen1b.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import transformers
from shapes import build

import hf_paged
from hf_paged.model.capture.replay import captures_of

CONTEXT = 384
SHORT, LONG = 32, 96


def seconds(model: torch.nn.Module, ids: torch.Tensor, new: int, paged: bool) -> float:
    """Seconds of one call."""
    options = {"cache_implementation": "paged"} if paged else {}
    torch.cuda.synchronize()
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def step(model: torch.nn.Module, ids: torch.Tensor, paged: bool, runs: int = 3) -> float:
    """Milliseconds of a decoding step: the difference of two lengths, a median."""
    seconds(model, ids, LONG, paged)
    found = []
    for _ in range(runs):
        found.append((seconds(model, ids, LONG, paged) - seconds(model, ids, SHORT, paged)) / (LONG - SHORT))
    return 1e3 * statistics.median(found)


def engine_step(engine: hf_paged.Engine, rows: int, steps: int = 64) -> float:
    """Milliseconds of a step of the engine in which all rows decode."""
    options = {"max_new_tokens": rows // 5 + 400}
    handles = [engine.submit(torch.randint(10, 150000, (CONTEXT,)).tolist(), **options) for _ in range(rows)]
    for _ in range(rows // 5 + 100):  # prompts, captures, and some replays
        engine.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    taken = time.perf_counter() - begin
    for handle in handles:
        handle.cancel()
    engine.step()
    return 1e3 * taken / steps


def tokens(count: int) -> list[int]:
    """A text of its own."""
    return torch.randint(10, 150000, (count,)).tolist()


def first_token(engine: hf_paged.Engine, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Milliseconds to the first token of a prompt, the tokens that were cached, and the whole answer."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    handle = engine.submit(prompt, max_new_tokens=64, min_new_tokens=64)
    next(iter(handle))
    taken = 1e3 * (time.perf_counter() - begin)
    output = handle.result()
    return taken, output.cached_tokens, output.sequences[0].token_ids


def prompts(engine: hf_paged.Engine, count: int) -> None:
    """Prompts of 16 to 512 tokens and one token of each answer, in flat rows and row by row."""
    print("     form", engine.stats()["form"], engine.stats()["off"].get("flat", ""), flush=True)
    texts = [tokens(16 + 496 * i // max(1, count - 1)) for i in range(count)]
    total = sum(map(len, texts))
    for why in (None, "for comparison"):
        engine.runner.why_rows = why
        found = []
        for _ in range(4):  # the first compiles
            torch.cuda.synchronize()
            begin = time.perf_counter()
            engine.generate(texts, max_new_tokens=1)
            torch.cuda.synchronize()
            found.append(time.perf_counter() - begin)
        taken = statistics.median(found[1:])
        print(
            f"{count} prompts, {total} tokens, {'rows' if why else 'flat'}: {1e3 * taken:8.1f} ms", flush=True
        )


def prefixes(engine: hf_paged.Engine) -> None:
    """Turns of a chat, and prompts with a common beginning, one after another."""
    engine.submit(tokens(64), max_new_tokens=8).result()
    said = tokens(2048)
    for turn in range(8):
        taken, cached, answer = first_token(engine, said)
        print(
            f"turn {turn + 1}: {len(said) - cached:5} of {len(said)} tokens computed, first token {taken:7.1f} ms",
            flush=True,
        )
        said = [*said, *answer, *tokens(64)]
    fresh = statistics.median(first_token(engine, tokens(len(said) - cached - 64))[0] for _ in range(3))
    print(f"a fresh prompt of the last turn's own tokens: {fresh:7.1f} ms", flush=True)
    for common, own in ((1500, 200), (300, 200), (4096, 2000)):
        beginning = tokens(common)
        found = [first_token(engine, [*beginning, *tokens(own)])[1] for _ in range(4)]
        print(f"common {common}, own {own}: cached {found}", flush=True)
    print("    ", engine.stats()["states"], flush=True)


def bandwidth() -> float:
    """Bytes a second of reading alone."""
    data = torch.ones(2**30, dtype=torch.float32, device="cuda")
    data.sum()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        data.sum()
    torch.cuda.synchronize()
    return 5 * data.nbytes / (time.perf_counter() - begin)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--engine", type=int, nargs="+", default=[], help="rows of the engine's steps")
    parser.add_argument("--prefixes", action="store_true", help="turns of a chat, and common beginnings")
    parser.add_argument("--prompts", type=int, default=0, help="prompts at once, in flat rows and one by one")
    parser.add_argument("--stock", action="store_true", help="measure stock too")
    given = parser.parse_args()
    model = build("qwen8b", "cuda", torch.bfloat16, num_hidden_layers=given.layers, pad_token_id=0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "transformers", transformers.__version__)
    print(f"read-only bandwidth {bandwidth() / 1e12:.2f} TB/s")
    for rows in given.rows:
        ids = torch.randint(10, 150000, (rows, CONTEXT), device="cuda")
        print(f"{rows:4} rows: paged {step(model, ids, paged=True):6.2f} ms", end="", flush=True)
        print(f", stock {step(model, ids, paged=False, runs=1):6.2f} ms" if given.stock else "", flush=True)
        pool = captures_of(model).pool
        print("    ", {**pool.stats()}, list(pool.reasons.values())[:2], flush=True)
        hf_paged.release(model)
    if given.engine:
        with hf_paged.Engine(model, prefix_caching=False) as engine:
            for rows in given.engine:
                found = statistics.median(engine_step(engine, rows) for _ in range(2))
                print(f"{rows:4} rows: engine {found:6.2f} ms", flush=True)
            print("    ", engine.stats()["graphs"], engine.stats()["off"], flush=True)
    if given.prompts:
        with hf_paged.Engine(model, prefix_caching=False) as engine:
            prompts(engine, given.prompts)
    if given.prefixes:
        with hf_paged.Engine(model) as engine:
            prefixes(engine)


if __name__ == "__main__":
    main()
