"""A sum over ranks in captured steps: NCCL, torch's two-shot and one-shot all-reduce over symmetric
memory; and with an addition and a norm behind it, in two kernels or in one.

    PYTHONPATH=.:kernels torchrun --nproc-per-node 2 benchmarks/sums.py     # on two GPUs of one host, or more

Microseconds of a sum of 13B's rows in bfloat16, in a graph of 40 of them. The one kernel's answers are
compared with sums of all parts on each device, those of one shot between devices.
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
from hf_paged.model.ranks import symmetric_memory
from hf_paged.model.ranks.symmetric_memory import LazySum, SymmetricMemory, symmetric_memory_of

HIDDEN = 5120
ROWS = (1, 8, 64, 128, 256, 512, 1024, 2048, 4096)
MOST_ONE_SHOT = 512
"""Rows beyond which one shot is not tried."""
MOST_FUSED = 1024
"""Rows beyond which one kernel is not tried."""
SUMS, REPLAYS = 40, 5
"""Sums of a graph, an even number: two in a row use different inboxes, also of two replays."""
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
    residual: torch.Tensor,
    weight: torch.Tensor,
    part: torch.Tensor | None = None,
    *,
    waits: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum with an addition and a norm; it waits for them, to be one kernel with them. part: this rank's."""
    with memory.waiting() if waits else nullcontext():
        room = memory.room(residual.shape, residual.dtype)
        assert room is not None
        if part is not None:
            room.copy_(part)
        total = memory.sum(room)
    assert isinstance(total, LazySum) == waits
    found = total.add_norm(kernels, residual, weight, EPS, centered=False) if waits else None
    return found or kernels.add_rms_norm(total, residual, weight, EPS)


def compare(memory: SymmetricMemory, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """Many sums in a row by one kernel each, held to sums of all parts here."""
    everywhere = []
    for rank in range(dist.get_world_size()):
        chance = torch.Generator().manual_seed(1 + rank)
        everywhere.append(
            [torch.randn(residual.shape, generator=chance).to(residual) for _ in range(COMPARED)]
        )
    right = []
    for parts in zip(*everywhere, strict=True):
        total = sum((part.float() for part in parts[1:]), start=parts[0].float()).to(residual)
        right.append(kernels.add_rms_norm(total, residual, weight, EPS))
    for _ in range(3):
        own = everywhere[dist.get_rank()]
        found = [with_norm(memory, residual, weight, part, waits=True) for part in own]
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        dist.barrier()


def compare_ranks(memory: SymmetricMemory, shape: torch.Size) -> None:
    """A sum in one shot has the same bits on all ranks."""
    room = memory.room(shape, torch.bfloat16)
    assert room is not None
    room.normal_(generator=torch.Generator(room.device).manual_seed(dist.get_rank()))
    own = memory.sum(room)
    everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, own)
    assert all(torch.equal(each, own) for each in everywhere), "one shot adds in another order on each rank"


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
    symmetric_memory.FUSED[dist.get_world_size()] = (0, 2 * MOST_FUSED * HIDDEN)
    memory = symmetric_memory_of(dist.group.WORLD)
    assert memory is not None
    shots = torch.ops.symm_mem
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    for rows in ROWS:
        room = memory.room((rows, HIDDEN), torch.bfloat16)
        assert room is not None
        out = torch.empty_like(room)
        own = torch.zeros_like(out)
        found = {
            "NCCL": in_a_graph(partial(dist.all_reduce, own)),
            "two shots": in_a_graph(partial(shots.two_shot_all_reduce_out, room, "sum", name, out)),
        }
        if rows <= MOST_ONE_SHOT:
            found["one shot"] = in_a_graph(partial(shots.one_shot_all_reduce_out, room, "sum", name, out))
        residual = torch.randn(room.shape, generator=torch.Generator().manual_seed(rows)).to(room)
        for few in (True, False) if rows <= MOST_ONE_SHOT else (False,):
            memory.one_shot = room.nbytes if few else 0
            if few:
                compare_ranks(memory, room.shape)
            apart = partial(with_norm, memory, residual, weight, waits=False)
            found[f"{'one shot' if few else 'two shots'} and norm"] = in_a_graph(apart)
        for few in (True, False) if rows <= MOST_FUSED else ():
            memory.fused_one_shot = room.nbytes if few else 0
            kind = f"one kernel in {'one shot' if few else 'two'}"
            found[kind] = in_a_graph(partial(with_norm, memory, residual, weight, waits=True))
            compare(memory, residual, weight)
        if rank == 0:
            print(f"{rows:5d} rows: " + ", ".join(f"{kind} {us:.1f} us" for kind, us in found.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
