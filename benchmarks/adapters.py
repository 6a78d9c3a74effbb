"""Many adapters in one batch: what the low-rank kernels cost in a decoding step, without the base's products.

    python benchmarks/adapters.py       # on a GPU, under a minute; the linear layers of the 8B Llama shape

The seven linear layers of 32 decoder layers, in one CUDA graph, median of ten replays: a shrink for each input
(q, k and v; o; gate and up; down) and an expand for each layer. Rows get adapters in turn, or none.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch
from shapes import line, where

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
import hf_paged_kernels as kernels

HIDDEN = 4096
INNER = 14336
KEYS = 1024
LAYERS = 32
INPUTS = [(HIDDEN, [HIDDEN, KEYS, KEYS]), (HIDDEN, [HIDDEN]), (HIDDEN, [INNER, INNER]), (INNER, [HIDDEN])]
"""The width of each input, and of what the layers make of it."""
CASES = [
    (1, 1, 1), (8, 1, 1), (64, 1, 1), (256, 1, 1), (8, 8, 8), (64, 8, 8), (256, 8, 8), (64, 64, 64),
    (256, 64, 64), (8, 0, 8), (256, 0, 8),
]  # fmt: skip
"""Rows, adapters among them, and slots for adapters."""
WIDE_CASES = [(1, 1, 1), (64, 8, 8), (256, 8, 8)]
"""Those of adapters in float32, beside a model in bfloat16."""


def table(
    outs: list[int], n: int, slots: int, rank: int, dtype: torch.dtype
) -> tuple[object, list[torch.Tensor]]:
    """Random adapters of the layers with one input, and the tensors that hold them."""
    found = kernels.LoraWeights(len(outs), slots, rank, dtype, "cuda")
    kept = []
    for layer, out in enumerate(outs):
        a = torch.randn(slots, rank, n, dtype=dtype, device="cuda") * 0.01
        b = torch.randn(slots, out, rank, dtype=dtype, device="cuda") * 0.01
        for slot in range(slots):
            found.put(layer, slot, a[slot], b[slot], 1.0)
        kept += [a, b]
    found.upload()
    return found, kept


def measure(rows: int, adapters: int, slots: int, rank: int, dtype: torch.dtype) -> float:
    """Milliseconds of the kernels of a step."""
    tables = [(n, outs, *table(outs, n, slots, rank, dtype)) for _ in range(LAYERS) for n, outs in INPUTS]
    inputs = {n: torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") for n in (HIDDEN, INNER)}
    outputs = {n: torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda") for n in (HIDDEN, KEYS, INNER)}
    index = [row % adapters if adapters else -1 for row in range(rows)]
    chosen = torch.tensor(index, dtype=torch.int32, device="cuda")
    plan = kernels.AdapterPlan(rows, slots, "cuda")

    def step() -> None:
        plan.update(chosen)
        for n, outs, weights, _ in tables:
            shrunk = kernels.lora_shrink(inputs[n], weights, plan)
            for layer, out in enumerate(outs):
                kernels.lora_expand(outputs[out], shrunk, weights, plan, layer=layer)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(13):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("the kernels are timed in CUDA graphs, and there is no CUDA device")
    print(line(where("cuda")))
    print("| rows | adapters | slots | type | ms |\n|---|---|---|---|---|")
    for cases, dtype in ((CASES, torch.bfloat16), (WIDE_CASES, torch.float32)):
        for rows, adapters, slots in cases:
            found = measure(rows, adapters, slots, 16, dtype)
            print(
                f"| {rows} | {adapters} | {slots} | {str(dtype).removeprefix('torch.')} | {found:.2f} |",
                flush=True,
            )
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
