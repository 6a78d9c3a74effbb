"""A step of a hybrid (Qwen3.5's shape of 8B, random weights, bf16) in stock and paged generate(), and the engine.

python benchmarks/hybrid.py [--rows 1 8 64] [--layers 32] [--stock] [--engine 1 8 64 256] [--prefixes]
    [--prompts 64] [--state-dtype bfloat16]
OMP_NUM_THREADS=1 python benchmarks/hybrid.py --shape qwen_tiny --rows 1 --layers 4    # does it run? on a CPU

Beam searches: benchmarks/generate.py --sections beams --shape qwen8b. Training: benchmarks/grpo.py --shape qwen1b.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
import transformers
from shapes import SHAPES, build

import hf_paged
from hf_paged.model.capture.replay import captures_of

CONTEXT = 384
SHORT, LONG = 32, 96
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait until the device has done what it was given."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(model: Any, ids: torch.Tensor, new: int, paged: bool, state_dtype: str | None) -> float:
    """Seconds of one call."""
    options: dict[str, Any] = {}
    if paged:
        options = {"cache_implementation": "paged", "cache_config": {"state_dtype": state_dtype}}
    synchronize()
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options)
    synchronize()
    return time.perf_counter() - begin


def step(model: Any, ids: torch.Tensor, paged: bool, runs: int = 3, state_dtype: str | None = None) -> float:
    """Milliseconds of a decoding step: the difference of two lengths, a median."""
    call = partial(seconds, model, ids, paged=paged, state_dtype=state_dtype)
    call(LONG)
    found = [(call(LONG) - call(SHORT)) / (LONG - SHORT) for _ in range(runs)]
    return 1e3 * statistics.median(found)


def agreement(model: Any, rows: int = 8) -> None:
    """Greedy answers over states in bfloat16 beside those over float32: how many tokens are the same, and how
    far log-probabilities are apart until the first that is not.
    """
    ids = tokens_of(model, rows, CONTEXT)
    found = []
    for dtype in (None, "bfloat16"):
        found.append(
            model.generate(
                ids,
                max_new_tokens=LONG,
                min_new_tokens=LONG,
                do_sample=False,
                cache_implementation="paged",
                cache_config={"state_dtype": dtype},
                return_dict_in_generate=True,
                output_logits=True,
            )
        )
    one, half = (answer.sequences[:, CONTEXT:] for answer in found)
    alike = (one == half).cumprod(1).bool()
    before = torch.cat([torch.ones_like(alike[:, :1]), alike[:, :-1]], 1)  # so far both had the same tokens
    apart = [
        (x.float().log_softmax(-1) - y.float().log_softmax(-1)).abs().mean(-1)
        for x, y in zip(found[0].logits, found[1].logits, strict=True)
    ]
    mean = torch.stack(apart, 1)[before].mean().item()
    print(
        f"states in bfloat16: {(one == half).float().mean():.1%} of tokens are the same, {alike.sum(1).float().mean():.0f} of "
        f"{LONG} before the first other one; log-probabilities differ by {mean:.1e} on average",
        flush=True,
    )


def tokens_of(model: Any, rows: int, count: int) -> torch.Tensor:
    """Random ids [rows, count]."""
    return torch.randint(10, model.config.vocab_size, (rows, count), device=DEVICE)


def engine_step(engine: hf_paged.Engine, rows: int, steps: int = 64, **more: Any) -> float:
    """Milliseconds of a step of the engine in which all rows decode; `more` are options of the requests."""
    options = {"max_new_tokens": rows // 5 + 400, **more}
    handles = [engine.submit(tokens(CONTEXT), **options) for _ in range(rows)]
    for _ in range(rows // 5 + 100):  # prompts, captures, and some replays
        engine.step()
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    synchronize()
    taken = time.perf_counter() - begin
    for handle in handles:
        handle.cancel()
    engine.step()
    return 1e3 * taken / steps


def tokens(count: int) -> list[int]:
    """A text of its own."""
    return torch.randint(10, 2000, (count,)).tolist()


def first_token(engine: hf_paged.Engine, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Milliseconds to the first token of a prompt, the tokens that were cached, and the whole answer."""
    synchronize()
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
            synchronize()
            begin = time.perf_counter()
            engine.generate(texts, max_new_tokens=1)
            synchronize()
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
    data = torch.ones(2**30, dtype=torch.float32, device=DEVICE)
    data.sum()
    synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        data.sum()
    synchronize()
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
    parser.add_argument("--state-dtype", choices=["bfloat16"], help="keep states so; also their agreement")
    parser.add_argument("--shape", choices=SHAPES, default="qwen8b")
    given = parser.parse_args()
    states: dict[str, Any] = {"state_dtype": given.state_dtype}
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    model = build(given.shape, DEVICE, dtype, num_hidden_layers=given.layers, pad_token_id=0)
    print("torch", torch.__version__, "transformers", transformers.__version__, states)
    if DEVICE == "cuda":
        print(f"{torch.cuda.get_device_name()}, read-only bandwidth {bandwidth() / 1e12:.2f} TB/s")
    for rows in given.rows:
        ids = tokens_of(model, rows, CONTEXT)
        print(f"{rows:4} rows: paged {step(model, ids, paged=True, **states):6.2f} ms", end="", flush=True)
        print(f", stock {step(model, ids, paged=False, runs=1):6.2f} ms" if given.stock else "", flush=True)
        pool = captures_of(model).pool
        print("    ", {**pool.stats()}, list(pool.reasons.values())[:2], flush=True)
        hf_paged.release(model)
    if given.state_dtype:
        agreement(model)
        hf_paged.release(model)
    if given.engine:
        with hf_paged.Engine(model, prefix_caching=False, **states) as engine:
            for rows in given.engine:
                found = statistics.median(engine_step(engine, rows) for _ in range(2))
                print(f"{rows:4} rows: engine {found:6.2f} ms", flush=True)
            print("    ", engine.stats()["graphs"], engine.stats()["off"], flush=True)
    if given.prompts:
        with hf_paged.Engine(model, prefix_caching=False, **states) as engine:
            prompts(engine, given.prompts)
    if given.prefixes:
        with hf_paged.Engine(model, **states) as engine:
            prefixes(engine)


if __name__ == "__main__":
    main()
