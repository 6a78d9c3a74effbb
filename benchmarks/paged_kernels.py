"""How fast the kernels are on this GPU, beside the best figures known: python benchmarks/paged_kernels.py,
under 150 s on an H200.

Every time is one launch of a CUDA graph that goes round over several layers' worth of cache, more than the
second-level cache holds. Answers are checked against float64 in the same run; the plan of a decode step is
timed on its own.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
import hf_paged_kernels as kernels

DIM = 128
ROUND_BYTES = 600 * 2**20


class Shape(NamedTuple):
    """A decode step in bf16, and the best time known for it (docs/benchmarks.md)."""

    rows: int
    query_heads: int
    heads: int
    context: int
    block_size: int
    bar: float
    """Microseconds a layer."""
    ragged: bool = False

    @property
    def name(self) -> str:
        context = (
            "512-4k"
            if self.ragged
            else f"{self.context // 1024}k"
            if self.context >= 1024
            else str(self.context)
        )
        return f"{self.rows}, {self.query_heads}/{self.heads}, {context}, {self.block_size}"

    @property
    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.context] * self.rows
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(0))
        return torch.linspace(512, 4096, self.rows).int()[order].tolist()

    @property
    def layer_bytes(self) -> int:
        return sum(self.lengths) * self.heads * DIM * 4


SHAPES = [
    Shape(1, 32, 8, 2048, 16, 11.3),
    Shape(1, 32, 8, 32768, 16, 40.7),
    Shape(8, 32, 8, 2048, 16, 22.8),
    Shape(8, 32, 8, 8192, 16, 67.9),
    Shape(64, 32, 8, 512, 16, 39.1),
    Shape(64, 32, 8, 2048, 16, 130.9),
    Shape(64, 32, 8, 8192, 16, 477.7),
    Shape(256, 32, 8, 512, 16, 133.4),
    Shape(256, 32, 8, 2048, 16, 484.7),
    Shape(64, 32, 8, 2048, 1, 133.3),
    Shape(64, 32, 8, 2048, 64, 128.8),
    Shape(64, 32, 8, 2304, 16, 168.0, ragged=True),
    Shape(1, 40, 40, 2048, 16, 18.5),
    Shape(8, 40, 40, 2048, 16, 89.9),
    Shape(64, 40, 40, 512, 16, 156.7),
    Shape(64, 40, 40, 1024, 16, 302.8),
]


class Step:
    """The tensors of one decode step over several layers; the pool lies head by head unless `by_token`."""

    def __init__(self, shape: Shape, noise: torch.Tensor, by_token: bool = False) -> None:
        self.shape = shape
        needs = [-(-length // shape.block_size) for length in shape.lengths]
        blocks = sum(needs)
        self.layers = max(2, ROUND_BYTES // shape.layer_bytes)
        inner = (shape.block_size, shape.heads) if by_token else (shape.heads, shape.block_size)
        size = self.layers * blocks * 2 * shape.heads * shape.block_size * DIM
        pool = noise[:size].view(self.layers, blocks, 2, *inner, DIM)
        self.pool = pool if by_token else pool.transpose(3, 4)
        ids = torch.randperm(blocks, device="cuda", dtype=torch.int32)
        self.table = torch.zeros(shape.rows, max(needs), dtype=torch.int32, device="cuda")
        for row, mine in enumerate(ids.split(needs)):
            self.table[row, : len(mine)] = mine
        self.lengths = torch.tensor(shape.lengths, dtype=torch.int32, device="cuda")
        self.query = torch.randn(shape.rows, shape.query_heads, DIM, device="cuda").bfloat16()
        self.out = torch.empty_like(self.query)

    def plan(self, tiling: kernels.tuning.Tiling | None = None) -> kernels.Plan:
        mean = sum(self.shape.lengths) // self.shape.rows
        plan = kernels.Plan(
            self.query, self.pool[0, :, 0], self.pool[0, :, 1], mean_length=mean, tiling=tiling
        )
        plan.update(self.lengths)
        return plan

    def attend(self, plan: kernels.Plan, layer: int) -> torch.Tensor:
        return kernels.decode(
            self.query, self.pool[layer, :, 0], self.pool[layer, :, 1], self.table, plan, out=self.out
        )

    def microseconds(self, plan: kernels.Plan, repeats: int = 11) -> float:
        launches = max(self.layers, 8)
        return graph_time([lambda i=i: self.attend(plan, i % self.layers) for i in range(launches)], repeats)

    def error(self, plan: kernels.Plan) -> float:
        """The worst relative error of a row, against float64, over the first, the last and the longest."""
        self.out.fill_(torch.nan)
        self.attend(plan, 1)
        rows = {0, self.shape.rows - 1, self.shape.lengths.index(max(self.shape.lengths))}
        return max(self._row_error(row) for row in rows)

    def _row_error(self, row: int) -> float:
        length, group = self.shape.lengths[row], self.shape.query_heads // self.shape.heads
        mine = self.table[row, : -(-length // self.shape.block_size)].long()
        k, v = (self.pool[1, mine, i].flatten(0, 1)[:length].double() for i in (0, 1))
        q = self.query[row].double().view(self.shape.heads, group, DIM)
        weights = (torch.einsum("hgd,thd->hgt", q, k) * DIM**-0.5).softmax(-1)
        expected = torch.einsum("hgt,thd->hgd", weights, v).flatten(0, 1)
        return float((self.out[row].double() - expected).norm() / expected.norm())


def graph_time(launches: list[Callable[[], object]], repeats: int = 11) -> float:
    """Microseconds a launch: the median over replays of one graph of all of them."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(launches))
    return statistics.median(times[2:])


def decode_table(noise: torch.Tensor) -> None:
    print(
        "\ndecode, us a layer\n| rows, q/kv heads, context, page | here | bar | here / bar | TB/s | error | "
        "plan |\n|---|---|---|---|---|---|---|"
    )
    met = 0
    for shape in SHAPES:
        step = Step(shape, noise)
        plan = step.plan()
        time, error = step.microseconds(plan), step.error(plan)
        planning = graph_time([lambda plan=plan, step=step: plan.update(step.lengths)] * 20)
        met += time <= shape.bar
        print(
            f"| {shape.name} | {time:.1f} | {shape.bar} | {time / shape.bar:.3f} | "
            f"{shape.layer_bytes / time / 1e6:.2f} "
            f"| {error:.1e} | {planning:.1f} |", flush=True,
        )  # fmt: skip
        assert error < 1e-2, shape
    print(f"{met} of {len(SHAPES)} at or below the bar")
    for shape in (SHAPES[0], SHAPES[5], SHAPES[7]):
        step = Step(shape, noise, by_token=True)
        plan = step.plan()
        assert step.error(plan) < 1e-2, shape
        print(f"pool token by token: {shape.name}: {step.microseconds(plan):.1f}")


class Prompt:
    """Prompts of one length, 32 query and 8 key heads, blocks of 16."""

    def __init__(self, rows: int, length: int, noise: torch.Tensor) -> None:
        self.rows, self.length = rows, length
        blocks = rows * length // 16
        self.pool = noise[: blocks * 2 * 8 * 16 * DIM].view(blocks, 2, 8, 16, DIM).transpose(2, 3)
        self.table = torch.randperm(blocks, device="cuda", dtype=torch.int32).view(rows, -1)
        self.borders = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * length
        self.lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)
        self.query = torch.randn(rows * length, 32, DIM, device="cuda").bfloat16()
        self.out = torch.empty_like(self.query)

    def attend(self, tiling: kernels.tuning.Tiling | None = None) -> torch.Tensor:
        return kernels.prefill(
            self.query,
            self.pool[:, 0],
            self.pool[:, 1],
            self.table,
            self.borders,
            self.lengths,
            self.length,
            out=self.out,
            tiling=tiling,
        )

    def teraflops(self, tiling: kernels.tuning.Tiling | None = None) -> float:
        operations = self.rows * 4 * self.length**2 / 2 * DIM * 32
        return operations / graph_time([lambda: self.attend(tiling)] * 3, 5) / 1e6

    def error(self) -> float:
        """Against scaled_dot_product_attention in fp32, the last row, its first and last 256 query tokens."""
        self.out.fill_(torch.nan)
        self.attend()
        k, v = (
            self.pool[self.table[-1].long(), i].flatten(0, 1).float().repeat_interleave(4, 1).transpose(0, 1)
            for i in (0, 1)
        )
        worst = 0.0
        for at in (torch.arange(256), torch.arange(self.length - 256, self.length)):
            mine = (at + (self.rows - 1) * self.length).cuda()
            scores = self.query[mine].float().transpose(0, 1) @ k.transpose(1, 2) * DIM**-0.5
            seen = torch.arange(self.length, device="cuda") <= at.cuda()[:, None]
            expected = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
            worst = max(worst, float((self.out[mine].float() - expected).norm() / expected.norm()))
        return worst


def prefill_table(noise: torch.Tensor) -> None:
    print("\nprefill, causal, 32/8 heads\n| prompts | TFLOP/s | error |\n|---|---|---|")
    for rows, length in ((1, 8192), (8, 2048)):
        prompt = Prompt(rows, length, noise)
        error = prompt.error()
        print(f"| {rows} x {length} | {prompt.teraflops():.0f} | {error:.1e} |", flush=True)
        assert error < 1e-2


def write_table(noise: torch.Tensor) -> None:
    print(
        "\nwrite of new tokens, 8 heads of 128, 32 layers\n| tokens | us a layer | TB/s | copy_ of the same "
        "bytes, us |\n|---|---|---|---|"
    )
    pool = noise[: 32 * 2048 * 2 * 8 * 16 * DIM].view(32, 2048, 2, 8, 16, DIM).transpose(3, 4)
    for tokens in (1, 64, 1024, 8192):
        new = noise[-32 * 2 * tokens * 8 * DIM :].view(32, 2, 1, tokens, 8, DIM).transpose(3, 4)
        slots = torch.randperm(2048 * 16, device="cuda")[:tokens]
        time = graph_time(
            [partial(kernels.write, *new[i], pool[i, :, 0], pool[i, :, 1], slots) for i in range(32)]
        )
        source, flat = new.transpose(3, 4).flatten(1), noise[: 32 * new[0].numel()].view(32, -1)
        copy = graph_time([partial(flat[i].copy_, source[i]) for i in range(32)])
        print(
            f"| {tokens} | {time:.2f} | {2 * new[0].numel() * 2 / time / 1e6:.3f} | {copy:.2f} |", flush=True
        )


def copy_table(noise: torch.Tensor) -> None:
    print(
        "\ncopy of blocks, 32 layers of 64 KiB a block\n"
        "| pairs | us | TB/s | copy_ of the same bytes, us | copy_ / here |\n|---|---|---|---|---|"
    )
    pool = noise[: 32 * 1024 * 2**15].view(32, 1024, 2**15)
    for pairs in (1, 8, 64, 256):
        calls = []
        for _ in range(8):
            ids = torch.randperm(1024, device="cuda", dtype=torch.int32)
            calls.append(partial(kernels.copy, [pool], ids[:pairs], ids[pairs : 2 * pairs]))
        time = graph_time(calls)
        words = 32 * pairs * 2**15
        plain = min(copy_time(noise, words, gap) for gap in (0, 8448))
        print(
            f"| {pairs} | {time:.1f} | {4 * words / time / 1e6:.2f} | {plain:.1f} | {plain / time:.2f} |",
            flush=True,
        )


def copy_time(noise: torch.Tensor, words: int, gap: int) -> float:
    """torch's copy_ of `words` elements to a place `gap` behind their end; the distance decides which banks
    meet.
    """
    starts = [
        i * (noise.numel() // 9 // 4096 * 4096) for i in range(8)
    ]  # aligned, or copy_ falls back to short words
    return graph_time(
        [lambda at=at: noise[at : at + words].copy_(noise[at + words + gap :][:words]) for at in starts]
    )


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    torch.manual_seed(0)
    noise = torch.empty(2**32 + 2**31, dtype=torch.bfloat16, device="cuda").normal_()
    for table in (decode_table, prefill_table, write_table, copy_table):
        table(noise)


if __name__ == "__main__":
    main()
