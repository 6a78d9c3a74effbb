"""Memory that the devices of several ranks reach in each other: one kernel sums what they wrote there.

A step's sums are small and wait for each other: on two H200 NCCL needs 13 us for a row of 4,096 numbers,
torch's two-shot all-reduce over symmetric memory 7; for 256 rows 38 and 13. In one shot each rank reads all
of the other's numbers instead of half of them, and waits for it once less.
"""

from __future__ import annotations

import logging
import math
import socket
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger("hf_paged")

MOST_BYTES = 32 << 20
"""What a sum may have: a part of a prompt of 2,048 tokens of 8,192 16-bit numbers."""
ONE_SHOT = {2: 1 << 20}
"""Bytes up to which one shot is faster than two, by the number of ranks. Of more than two it would have to be
measured, and whether all ranks add in one order.
"""
LETTING_GO = 2.0
"""Seconds in which kernels that wait for a failed rank are let go."""
WORD = 16
"""Bytes that the kernel moves at once."""
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, SymmetricMemory | None] = weakref.WeakKeyDictionary()
"""What each group of ranks has. It stays as long as the group: captured steps read its addresses."""


class SymmetricMemory:
    """Bytes on this rank's device, which all ranks of a group read in their kernels."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks make theirs together."""
        import torch.distributed._symmetric_memory as symmetric

        self.bytes: torch.Tensor = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        handle: Any = symmetric.rendezvous(self.bytes, group.group_name)
        self._pads = [handle.get_signal_pad(rank) for rank in range(group.size())]
        self._rank = group.rank()
        self._name = group.group_name
        self._multiple = WORD * group.size()
        self._one_shot = ONE_SHOT.get(group.size(), 0)
        self.sums = 0
        """How many were begun."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor for this rank's part of a sum; None where the kernel cannot take that many numbers."""
        need = math.prod(shape) * dtype.itemsize
        if need % self._multiple or not 0 < need <= MOST_BYTES:
            return None
        return self.bytes[:need].view(dtype).view(*shape)

    def sum(self, room: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of what they wrote, in a tensor of its own: the same bits on all of them."""
        out = torch.empty_like(room)
        self.sums += 1
        shots = torch.ops.symm_mem
        few = room.nbytes <= self._one_shot
        all_reduce = shots.one_shot_all_reduce_out if few else shots.two_shot_all_reduce_out
        all_reduce(room, "sum", self._name, out)
        return out

    def end_waits(self) -> None:
        """A rank has failed: let no kernel of this device wait for it. What they answer is never read.

        A kernel waits until another rank writes a one in this rank's pad, or takes one out of its own.
        """
        stream = torch.cuda.Stream(self.bytes.device)  # others may be waiting
        end = time.monotonic() + LETTING_GO
        with torch.cuda.stream(stream):
            while time.monotonic() < end:
                for rank, pad in enumerate(self._pads):
                    pad.fill_(rank == self._rank)
                stream.synchronize()
                time.sleep(LETTING_GO / 1000)


def end_waits(group: dist.ProcessGroup) -> None:
    """Let the kernels of this process that wait for the ranks of a group come to their end."""
    memory = _known.get(group)
    if memory is not None:
        memory.end_waits()


def sums_of(group: dist.ProcessGroup) -> int:
    """How many sums the ranks of a group have begun here."""
    memory = _known.get(group)
    return 0 if memory is None else memory.sums


def symmetric_memory_of(group: dist.ProcessGroup) -> SymmetricMemory | None:
    """What the ranks of a group have together; None, on all of them, if they cannot. All ask together."""
    if not torch.cuda.is_available() or dist.get_backend(group) != "nccl":
        return None
    if group not in _known:
        _known[group] = _made(group, torch.device("cuda", torch.cuda.current_device()))
    return _known[group]


def symmetric_memories() -> list[torch.Tensor]:
    """The tensors of this process that other ranks read."""
    return [memory.bytes for memory in list(_known.values()) if memory is not None]


def _made(group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory | None:
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) > 1:
        return None
    memory = None
    try:
        memory = SymmetricMemory(group, device)
    except (ImportError, AttributeError, RuntimeError) as error:  # devices without a link, or an older torch
        logger.info("ranks sum by NCCL alone: %s", error)
    everywhere = torch.tensor([memory is not None], dtype=torch.int32, device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    return memory if everywhere.item() else None
