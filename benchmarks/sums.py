"""A sum over two ranks in captured steps: NCCL, torch's two-shot and one-shot all-reduce over symmetric memory;
and with an addition and a norm behind it, in two kernels or in one.

    PYTHONPATH=.:kernels torchrun --nproc-per-node 2 benchmarks/sums.py     # on two GPUs of one host

Microseconds of a sum of 13B's rows in bfloat16, in a graph of 40 of them. The one kernel's answers are compared
with those of two.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

import hf_paged_kernels as kernels
from hf_paged.model import symmetric_memory
from hf_paged.model.symmetric_memory import LazySum, SymmetricMemory, symmetric_memory_of

HIDDEN = 5120
ROWS = (1, 8, 64, 128, 256, 512, 1024, 2048, 4096)
MOST_ONE_SHOT = 512
"""Rows beyond which one shot is not tried."""
MOST_FUSED = 1024
"""Rows beyond which one kernel is not tried."""
SUMS, REPLAYS = 40, 5
COMPARED = 20
EPS = 1e-5


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


def with_norm(
    memory: SymmetricMemory,
    shape: tuple[int, int],
    residual: torch.Tensor,
    weight: torch.Tensor,
    places: list[int | None],
    parts: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Sums with an addition and a norm, whose parts lie at these places; None for the one of two kernels."""
    found = []
    for i, place in enumerate(places):
        with nullcontext() if place is None else memory.waiting(place):
            room = memory.room(shape, torch.bfloat16)
            assert room is not None
            if parts is not None:
                room.copy_(parts[i])
            total = memory.sum(room)
        if isinstance(total, LazySum):
            both = total.add_norm(kernels, residual, weight, EPS, centered=False)
            assert both is not None
            found += both
        else:
            found += kernels.add_rms_norm(total, residual, weight, EPS)
    return found


def compare(
    memory: SymmetricMemory, shape: tuple[int, int], residual: torch.Tensor, weight: torch.Tensor
) -> None:
    """Many sums in a row by one kernel each, held to those of two."""
    chance = torch.Generator().manual_seed(1 + dist.get_rank())
    parts = [torch.randn(shape, generator=chance).to(residual) for _ in range(COMPARED)]
    memory.one_shot = parts[0].nbytes
    right = with_norm(memory, shape, residual, weight, [None] * COMPARED, parts)
    for _ in range(3):
        found = with_norm(memory, shape, residual, weight, [0, 1] * (COMPARED // 2), parts)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        dist.barrier()


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    name = dist.group.WORLD.group_name
    symmetric_memory.MOST_BYTES = 2 * max(ROWS) * HIDDEN
    symmetric_memory.MOST_FUSED = 2 * MOST_FUSED * HIDDEN
    memory = symmetric_memory_of(dist.group.WORLD)
    assert memory is not None
    shots = torch.ops.symm_mem
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    for rows in ROWS:
        shape = rows, HIDDEN
        room = memory.room(shape, torch.bfloat16)
        assert room is not None
        out = torch.empty_like(room)
        own = torch.zeros_like(out)
        found = {
            "NCCL": in_a_graph(partial(dist.all_reduce, own)),
            "two shots": in_a_graph(partial(shots.two_shot_all_reduce_out, room, "sum", name, out)),
        }
        if rows <= MOST_ONE_SHOT:
            found["one shot"] = in_a_graph(partial(shots.one_shot_all_reduce_out, room, "sum", name, out))
        residual = torch.randn(shape, generator=torch.Generator().manual_seed(rows)).to(room)
        for few in (True, False) if rows <= MOST_ONE_SHOT else (False,):
            memory.one_shot = room.nbytes if few else 0
            apart = partial(with_norm, memory, shape, residual, weight, [None])
            found[f"{'one shot' if few else 'two shots'} and norm"] = in_a_graph(apart)
        if rows <= MOST_FUSED:
            together = partial(with_norm, memory, shape, residual, weight, [0, 1])
            found["one kernel"] = in_a_graph(together) / 2
            compare(memory, shape, residual, weight)
        if rank == 0:
            print(f"{rows:5d} rows: " + ", ".join(f"{kind} {us:.1f} us" for kind, us in found.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
