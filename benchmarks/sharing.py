"""How many blocks sharing saves, beside the PagedAttention paper's ranges. Needs no GPU.

    OMP_NUM_THREADS=1 python benchmarks/sharing.py

Saved = blocks saved / blocks without sharing, the paper's own measure (arXiv 2309.06180, section 6.3).
Samples: the books fork and append over lognormal length traces with the paper's means, and must agree with
the closed form. Beams: real beam searches of the embedded model at those lengths, blocks counted at every
step.
"""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged import demo
from hf_paged.blocks import BlockPool, BlockTable, append

BLOCK = 16
MEANS = {"alpaca": (19, 58, 0.8, 512), "sharegpt": (161, 338, 1.0, 1024)}
"""Mean prompt, mean output, sigma of the logarithm, cap: the paper's figure 11."""
PAPER = {
    ("samples", "alpaca"): "6.1-9.8 %",
    ("samples", "sharegpt"): "16.2-30.5 %",
    ("beams", "alpaca"): "37.6-55.2 %",
    ("beams", "sharegpt"): "44.3-66.3 %",
}


def lengths(trace: str, count: int) -> list[tuple[int, int]]:
    """Prompt and output lengths of `count` requests."""
    prompt, output, sigma, cap = MEANS[trace]
    rng = random.Random(0)

    def draw(mean: int) -> int:
        return min(cap, max(4, int(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))

    return [(draw(prompt), draw(output)) for _ in range(count)]


def samples(trace: str, width: int, requests: int = 2000) -> tuple[float, float]:
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


def beams(trace: str, width: int, requests: int) -> float:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=12, help="beam searches per trace and width")
    options = parser.parse_args()
    print(
        f"block {BLOCK}, hf_paged {hf_paged.__version__}, transformers {transformers.__version__}, torch "
        f"{torch.__version__}"
    )
    print(
        "| what | trace | width 2 | width 4 | width 6 | the paper, widths 2 to 6 |\n|---|---|---|---|---|---|"
    )
    for trace in MEANS:
        found = [samples(trace, width) for width in (2, 4, 6)]
        assert all(abs(booked - closed) < 1e-12 for booked, closed in found), (
            "the books and the closed form disagree"
        )
        cells = " | ".join(f"{booked:.1%}" for booked, _ in found)
        print(f"| samples | {trace} | {cells} | {PAPER['samples', trace]} |", flush=True)
    for trace in MEANS:
        cells = " | ".join(f"{beams(trace, width, options.requests):.1%}" for width in (2, 4, 6))
        print(f"| beams | {trace} | {cells} | {PAPER['beams', trace]} |", flush=True)


if __name__ == "__main__":
    main()
