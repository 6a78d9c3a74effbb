"""Time the tilings of the kernels on this GPU: what kernels/hf_paged_kernels/tuning.py is made from.

python scripts/tune_kernels.py OUT.tsv [decode] [prefill] [ranks]; prints the best of every shape of
benchmarks/paged_kernels.py, or of what ranks have of heads, beside what the table has now.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from itertools import product
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("benchmarks", "kernels")]
from paged_kernels import SHAPES, Prompt, Shape, Step  # noqa: E402 (benchmarks/paged_kernels.py)

from hf_paged_kernels.tuning import Tiling  # noqa: E402 (the same)

GROUPED = [
    (16, 32, 1, 3), (16, 32, 1, 4), (16, 32, 1, 6), (16, 32, 2, 4), (16, 64, 2, 3), (16, 64, 2, 4), (16, 64, 4, 3), (16, 64, 4, 4),
    (16, 128, 4, 2), (16, 128, 4, 3), (64, 32, 4, 4), (64, 64, 4, 3), (64, 128, 4, 3),
]  # fmt: skip
SINGLE = [
    (16, 16, 1, 4), (16, 32, 1, 3), (16, 32, 1, 4), (16, 32, 1, 5), (16, 32, 2, 4), (16, 32, 2, 5), (16, 64, 1, 3), (16, 64, 2, 4),
    (16, 64, 4, 3), (64, 64, 4, 3),
]  # fmt: skip
RANKS = [
    Shape(rows, query_heads, heads, context, 16, 0)
    for query_heads, heads in ((16, 2), (8, 2), (10, 10), (8, 4))
    for rows, context in ((8, 448), (64, 448), (256, 448), (64, 2048))
]
"""The heads of 70B, 8B and 13B on each of four ranks, and of 8B on each of two."""
PER_SM = (1, 2, 3, 4, 6, 8, 12)
PROMPTS = [
    Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 4), Tiling(128, 128, 8, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 3),
    Tiling(128, 64, 8, 2, registers=128), Tiling(128, 32, 8, 3, registers=128), Tiling(128, 32, 8, 4, registers=128),
    Tiling(64, 32, 4, 3, registers=168), Tiling(64, 64, 4, 2, registers=168),
]  # fmt: skip


def tilings(shape: Shape) -> list[Tiling]:
    """Those that make different plans of this shape."""
    found = {}
    for base, per_sm in product(SINGLE if shape.query_heads == shape.heads else GROUPED, PER_SM):
        tiles = [-(-length // base[1]) for length in shape.lengths]
        share = max(1, -(-sum(tiles) * shape.heads // (132 * per_sm)))
        found.setdefault((base, min(share, max(tiles))), Tiling(*base, per_sm))
    return list(found.values())


def compile_one(job: tuple) -> None:
    """Leave one kernel in Triton's cache on disk."""
    noise = torch.zeros(2**23, dtype=torch.bfloat16, device="cuda")
    try:
        if job[0] == "prefill":
            Prompt(1, 64, noise).attend(job[1])
        else:
            _, query_heads, heads, page, base = job
            step = Step(
                Shape(1, query_heads, heads, 64, page, 0),
                torch.zeros(2**23, dtype=torch.bfloat16, device="cuda").repeat(40),
            )
            step.attend(step.plan(Tiling(*base)), 0)
    except Exception as error:
        print("cannot", job, type(error).__name__, str(error)[:80])


def compile_all(jobs: list[tuple]) -> None:
    begun = time.time()
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    print(f"compiled {len(jobs)} kernels in {time.time() - begun:.0f} s", flush=True)


def main() -> None:
    what = sys.argv[2:] or ["decode", "prefill"]
    jobs = [("prefill", base) for base in PROMPTS] if "prefill" in what else []
    shapes = (SHAPES if "decode" in what else []) + (RANKS if "ranks" in what else [])
    if shapes:
        pages = {(s.query_heads, s.heads, s.block_size) for s in shapes}
        jobs += [
            ("decode", *key, base)
            for key in sorted(pages)
            for base in (SINGLE if key[0] == key[1] else GROUPED)
        ]
    compile_all(jobs)
    noise = torch.empty(2**32 + 2**31, dtype=torch.bfloat16, device="cuda").normal_()
    with Path(sys.argv[1]).open("w") as out:
        for shape in shapes:
            step, results = Step(shape, noise), []
            now = step.plan()
            known = f"{step.microseconds(now, 5):.1f}:{','.join(map(str, now.tiling[:5]))}"
            for tiling in tilings(shape):
                try:
                    results.append((step.microseconds(step.plan(tiling), 5), tiling))
                except Exception as error:
                    print("cannot", tiling, type(error).__name__)
            results.sort()
            for micros, tiling in results:
                out.write(f"{shape.name}\t{micros:.2f}\t{tuple(tiling)}\n")
            best = " ".join(
                f"{micros:.1f}:{','.join(map(str, tiling[:5]))}" for micros, tiling in results[:5]
            )
            bar = f" bar {shape.bar}" if shape.bar else ""
            print(f"{shape.name}{bar} now {known} | {best}", flush=True)
        for rows, length in ((1, 8192), (8, 2048)) if "prefill" in what else []:
            prompt, results = Prompt(rows, length, noise), []
            for base in PROMPTS:
                try:
                    results.append((prompt.teraflops(base), base))
                except Exception as error:
                    print("cannot", base, type(error).__name__)
            best = " ".join(
                f"{speed:.0f}:{','.join(map(str, base))}"
                for speed, base in sorted(results, key=lambda result: -result[0])
            )
            print(f"prefill {rows} x {length} | {best}", flush=True)


if __name__ == "__main__":
    main()
