"""Rows that read common blocks once by the C++ op of CPUs, and the same rows each by itself, by turns.

    OMP_NUM_THREADS=1 python benchmarks/shared_reads_cpu.py     # one thread; builds the op if it is missing

Attention of one layer: rows with common tokens and 64 of their own, groups from two rows on.

own, once   milliseconds, medians of `--rounds` turns
of it       the median over turns of the time together divided by that of every row by itself
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from shapes import Report, common_parser, report_of

import hf_paged_native as native
from hf_paged.blocks import SharedReads

BLOCK = 16
CASES: list[tuple[int, int, int, dict[str, int]]] = [
    *((members, 1, common, {}) for members in (2, 4, 8) for common in (128, 1024)),
    (32, 1, 2048, {}), (8, 4, 512, {}),
    *((members, 1, 1024, {"heads": 32, "group": 1}) for members in (2, 4, 8)),
    *((members, 1, 128, {"heads": 8, "group": 1, "dim": 64}) for members in (2, 4, 8)),
]  # fmt: skip
"""Members of a group, groups, common tokens, and what is not an 8B model's."""


def turns(own: Callable[[], Any], once: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median of their ratios."""
    times: dict[Callable[[], Any], list[float]] = {own: [], once: []}
    for number in range(rounds + 1):
        for call in (own, once):
            begin = time.perf_counter()
            call()
            if number:  # the first warms up
                times[call].append(time.perf_counter() - begin)
    ratio = statistics.median(b / a for a, b in zip(times[own], times[once], strict=True))
    return statistics.median(times[own]), statistics.median(times[once]), ratio


def op(report: Report, options: argparse.Namespace) -> None:
    """Attention of one layer."""
    report.table(
        "op", "Attention of one layer, ms", case=("case", ""), dtype=("dtype", ""), own=("each its own", ".2f"),
        once=("common once", ".2f"), ratio=("of it", ".2f"),
    )  # fmt: skip
    library = native.load(native.build())
    for members, groups, common, shape in CASES:
        for dtype in (torch.float32, torch.bfloat16) if members == 32 else (torch.float32,):
            own, once = calls(library, members, groups, common, dtype, **shape)
            assert (own() - once()).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
            seconds = turns(own, once, options.rounds)
            found = {"own": seconds[0] * 1e3, "once": seconds[1] * 1e3, "ratio": seconds[2]}
            heads, group, dim = (
                shape.get(name, how) for name, how in (("heads", 8), ("group", 4), ("dim", 128))
            )
            name = f"{groups} x {members} rows, {common:,} + 64, {heads} key heads of {dim}, {heads * group} heads"
            report.row(case=name, dtype=str(dtype).removeprefix("torch."), **found)


def calls(
    library: Any,
    members: int,
    groups: int,
    common: int,
    dtype: torch.dtype,
    heads: int = 8,
    group: int = 4,
    dim: int = 128,
) -> list[Callable[[], torch.Tensor]]:
    """Attention in which every row reads by itself, and in which rows read together."""
    rows, shared, own = members * groups, common // BLOCK, 64 // BLOCK
    total = groups * shared + rows * own
    torch.manual_seed(0)
    keys, values = (torch.randn(total * BLOCK, heads, dim).to(dtype) for _ in range(2))
    query = torch.randn(rows, heads * group, 1, dim).to(dtype)
    ids = torch.randperm(total, dtype=torch.int32)
    table = torch.empty(rows, shared + own, dtype=torch.int32)
    table[:, :shared] = ids[: groups * shared].view(groups, shared).repeat_interleave(members, 0)
    table[:, shared:] = ids[groups * shared :].view(rows, own)
    lists, lengths = table.tolist(), [common + 64] * rows
    books = SharedReads(BLOCK, always=True)
    found = books.follow(range(rows), lengths, lambda row, count: lists[row][:count], ())
    numbers = torch.tensor(found, dtype=torch.int32).view(rows, 8)
    made = []
    for together in (None, numbers):
        plan = native.Attend(library, query, keys, values, BLOCK)
        plan.update(table, torch.tensor(lengths, dtype=torch.int32), together)
        made.append(partial(plan.run, query, keys, values))
    return made


def main() -> None:
    parser = common_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    options.shape, options.device = "llama8b", "cpu"
    op(report_of(options), options)


if __name__ == "__main__":
    main()
