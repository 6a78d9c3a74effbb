"""A sum over two ranks in captured steps: NCCL, torch's two-shot and one-shot all-reduce over symmetric memory.

    torchrun --nproc-per-node 2 benchmarks/sums.py     # on two GPUs of one host

Microseconds of a sum of 13B's rows in bfloat16, in a graph of 40 of them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

HIDDEN = 5120
ROWS = (1, 8, 64, 128, 256, 512, 1024, 2048, 4096)
MOST_ONE_SHOT = 512
"""Rows beyond which one shot is not tried."""
SUMS, REPLAYS = 40, 5


def in_a_graph(act: Callable[[], object]) -> float:
    """Microseconds of an act, of many in one graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            act()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SUMS):
            act()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / (SUMS * REPLAYS)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    import torch.distributed._symmetric_memory as symmetric

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    name = dist.group.WORLD.group_name
    memory = symmetric.empty(max(ROWS) * HIDDEN, dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(memory, name)
    shots = torch.ops.symm_mem
    for rows in ROWS:
        room = memory[: rows * HIDDEN]
        out = torch.empty_like(room)
        own = torch.zeros_like(out)
        found = {
            "NCCL": in_a_graph(partial(dist.all_reduce, own)),
            "two shots": in_a_graph(partial(shots.two_shot_all_reduce_out, room, "sum", name, out)),
        }
        if rows <= MOST_ONE_SHOT:
            found["one shot"] = in_a_graph(partial(shots.one_shot_all_reduce_out, room, "sum", name, out))
        if rank == 0:
            print(f"{rows:5d} rows: " + ", ".join(f"{kind} {us:.1f} us" for kind, us in found.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
