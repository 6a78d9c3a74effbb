"""Who is let in when: the watermark against the future peak, on the books alone. Needs no GPU and computes no
token.

    OMP_NUM_THREADS=1 python benchmarks/admission.py

Every request of a trace is there from the beginning, with the trace's longest answer as its max_new_tokens
and an end of its own that the scheduler does not know. Pools are given as a share of what `--at-once`
requests of the mean length hold in the middle of their answers. Computed twice = tokens computed again after
preemptions / tokens of prompts and answers. Speed is a proxy: steps take a fixed time and some more for each
token, as measured for the 8B shape on an H200.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

from traces import TRACES, Ask, trace

from hf_paged.blocks import BlockPool, Full
from hf_paged.scheduling import KVCacheGroup, Limits, Request, Scheduler

STEP, TOKEN = 5.5e-3, 2.6e-5
"""Seconds of a step, and of each of its tokens: 5.6 ms with one row and 12.2 ms with 256
(docs/benchmarks.md).
"""


TOKENS = 2048
"""The most of a step."""


class Replay(NamedTuple):
    """What the books did."""

    preemptions: int
    steps: int
    computed: int
    seconds: float
    used: float
    host: float


def replay(
    asks: list[Ask],
    longest: int,
    blocks: int,
    size: int,
    at_once: int,
    admission: str,
    watch: Callable[[Scheduler], None] | None = None,
) -> Replay:
    """Run a trace through the scheduler; tokens come out of nowhere. watch: sees the books after every
    step.
    """
    pool = BlockPool(blocks, size)
    scheduler = Scheduler(
        [KVCacheGroup(Full(), pool)],
        Limits(max(TOKENS, at_once), at_once),
        admission=admission,
        prefix_caching=False,
    )
    ends = {}
    for number, ask in enumerate(asks):
        group = scheduler.submit(Request(number, tuple(ask.prompt), len(ask.prompt) + longest))
        ends[group] = len(ask.prompt) + ask.new
    steps = computed = used = 0
    seconds = host = 0.0
    while scheduler.unfinished:
        begin = time.process_time()
        plan = scheduler.schedule()
        host += time.process_time() - begin
        scheduler.commit(plan)
        if watch is not None:
            watch(scheduler)
        for row in plan.rows:
            for sequence in row.samples:
                scheduler.extend([sequence], [7])
                if len(sequence.tokens) == ends[sequence.group]:
                    scheduler.finish(sequence)
        steps, computed, used = steps + 1, computed + plan.tokens, used + pool.held
        seconds += STEP + TOKEN * plan.tokens
    return Replay(
        scheduler.counts["preemptions"], steps, computed, seconds, used / steps / blocks, host / steps
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--traces", choices=TRACES, nargs="+", default=list(TRACES))
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.7, 0.5, 0.2])
    options = parser.parse_args()
    print(f"{options.requests} requests, up to {options.at_once} at once, block {options.block_size}")
    print(
        "| trace | pool | admission | preemptions | steps | computed twice | pool held | tok/s, proxy | "
        "schedule() a step |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.traces:
        prompt, answer, _, longest = TRACES[name]
        asks = trace(name, options.requests, 1000)
        least = sum(len(ask.prompt) + ask.new - 1 for ask in asks)
        for share in options.shares:
            # An answer that runs is seen in its middle; blocks hold B/2 slots in vain on average.
            blocks = int(share * options.at_once * (prompt + answer / 2) / options.block_size)
            blocks = max(blocks, 2 * -(-2 * longest // options.block_size))
            for admission in ("watermark", "future"):
                found = replay(asks, longest, blocks, options.block_size, options.at_once, admission)
                speed, twice = sum(ask.new for ask in asks) / found.seconds, found.computed / least - 1
                print(
                    f"| {name} | {blocks} ({share:.0%}) | {admission} | {found.preemptions} | {found.steps} ",
                    end="",
                )
                print(
                    f"| {twice:.1%} | {found.used:.0%} | {speed:,.0f} | {found.host * 1e6:.0f} us |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
