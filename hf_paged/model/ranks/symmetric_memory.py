"""Memory that the devices of several ranks reach in each other: one kernel sums what they wrote there.

A step's sums are small and wait for each other: on two H200 NCCL needs 13 us for a row of 4,096 numbers,
torch's two-shot all-reduce over symmetric memory 7; for 256 rows 38 and 13. In one shot each rank reads all
of the others' numbers instead of a part of them, and waits for them once less.
"""

from __future__ import annotations

import logging
import math
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..lazy import LazyTensor, NotCapturable

logger = logging.getLogger("hf_paged")

MOST_BYTES = 32 << 20
"""Most bytes of a sum: a part of a prompt of 2,048 tokens of 8,192 16-bit numbers."""
ONE_SHOT = {2: 1 << 20, 4: 1 << 19}
"""Bytes up to which one shot is faster than two, by the number of ranks."""
FUSED = {2: (8 << 20, 8 << 20), 4: (1 << 18, 8 << 20)}
"""Bytes up to which one kernel sums with an addition and a norm, in one shot and in two, by ranks."""
LETTING_GO = 2.0
"""Seconds in which kernels that wait for a failed rank are let go."""
WORD = 16
"""Bytes that the kernel moves at once."""
SENT = (2, 4)
"""Bytes of the numbers that one kernel with a norm sums."""
EMPTY = 255
"""Every byte of an inbox to which no part was sent."""
_may_wait: ContextVar[bool] = ContextVar("hf_paged_a_sum_may_wait", default=False)
"""True if the next sum may wait for an addition and a norm."""
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, SymmetricMemory | None] = weakref.WeakKeyDictionary()
"""Memory of each group of ranks. It stays as long as the group: captured steps read its addresses."""
_failed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The groups of which a rank has failed."""


class SymmetricMemory:
    """Bytes on this rank's device, which all ranks of a group read in their kernels."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks make theirs together."""
        import torch.distributed._symmetric_memory as symmetric

        self.fused_one_shot, self.most_fused = FUSED.get(group.size(), (0, 0))
        parts = MOST_BYTES + self.most_fused
        inboxes = 2, group.size(), self.most_fused
        size = parts + math.prod(inboxes)
        self.bytes: torch.Tensor = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle: Any = symmetric.rendezvous(self.bytes, group.group_name)
        ranks = range(group.size())
        self._pads = [handle.get_signal_pad(rank).view(torch.int32) for rank in ranks]
        everywhere = [handle.get_buffer(rank, (size,), torch.uint8) for rank in ranks]
        self._inboxes = [each[parts:].view(inboxes) for each in everywhere]
        self._pads[group.rank()].fill_(0)  # `let_go` cannot load this kernel while others wait, or the next
        self._inboxes[group.rank()].fill_(EMPTY)
        self._rank = group.rank()
        self._name = group.group_name
        self._multiple = WORD * group.size()
        self.one_shot = ONE_SHOT.get(group.size(), 0)
        self.sums = 0
        """How many were begun."""
        self.unmet: int | None = None
        """Which inboxes the last sum used that waited for a norm, if ranks have not met since: another rank
        may still wait for its parts.
        """
        self._group = weakref.ref(group)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that steps read and write there, and the pads by which ranks signal each other."""
        return [self.bytes, *self._inboxes, *self._pads]

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor for this rank's part of a sum; None where the kernel cannot take that many numbers."""
        need = math.prod(shape) * dtype.itemsize
        if need % self._multiple or not 0 < need <= MOST_BYTES:
            return None
        waits = _may_wait.get() and need <= self.most_fused and dtype.itemsize in SENT
        _may_wait.set(False)
        begin = MOST_BYTES if waits else 0
        return self.bytes[begin : begin + need].view(dtype).view(*shape)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward in which sums may wait: ranks begin with the same inboxes, and meet at the end."""
        self.unmet = None  # one of them may have broken off a recording
        yield
        if self.unmet is not None:
            self.meet()

    def meet(self) -> None:
        """Sum a few bytes, behind which all ranks have taken the parts before."""
        self.sum_now(self.bytes[: WORD * len(self._pads)].view(torch.float32))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within: the first sum may wait, as a LazySum, for an addition and a norm in one kernel with it.

        Ranks send their parts in that kernel, and do not meet behind it: the next go to other inboxes.
        """
        token = _may_wait.set(True)
        try:
            yield
        finally:
            _may_wait.reset(token)

    def sum(self, room: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of what they wrote, in a tensor of its own: the same bits on all of them."""
        waits = room.storage_offset() * room.itemsize >= MOST_BYTES
        return LazySum(room.shape, room.dtype, room.device, self, room) if waits else self.sum_now(room)

    def sum_now(self, room: torch.Tensor) -> torch.Tensor:
        """The same by one kernel behind which all ranks have read the parts."""
        require_whole(self._group())
        out = torch.empty_like(room)
        self.sums += 1
        self.unmet = None
        shots = torch.ops.symm_mem
        few = room.nbytes <= self.one_shot
        all_reduce = shots.one_shot_all_reduce_out if few else shots.two_shot_all_reduce_out
        all_reduce(room, "sum", self._name, out)
        return out

    def add_norm(
        self, kernels: Any, room: torch.Tensor, *given: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of what the ranks wrote and a residual, and its norm, as `reduce_add_rms_norm` has it."""
        require_whole(self._group())
        self.sums += 1
        self.unmet = turn = int(self.unmet == 0)
        inboxes = [each[turn].view(room.dtype) for each in self._inboxes]
        shots = 1 if room.nbytes <= self.fused_one_shot else 2
        found: tuple[torch.Tensor, torch.Tensor] = kernels.reduce_add_rms_norm(
            room, inboxes, self._rank, *given, shots=shots, **options
        )
        return found

    def end_waits(self) -> None:
        """A rank has failed: let no kernel of this device wait for it. What they answer is never read."""
        stream = torch.cuda.Stream(self.bytes.device)  # others may be waiting
        with torch.cuda.stream(stream):
            let_go(self._pads, self._inboxes[self._rank], stream.synchronize)


class LazySum(LazyTensor):
    """A sum over ranks whose parts are there: read in any other way than by `add_norm`, it is made."""

    _memory: SymmetricMemory
    _room: torch.Tensor

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *given: Any) -> None:
        self._memory, self._room = given
        self.make = partial(self._memory.sum_now, self._room)

    def add_norm(self, kernels: Any, *given: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The sum with a residual, and its norm; None if it was made alone. Nothing reads it afterwards."""
        if self._dense is not None:
            return None
        self.make = _overwritten
        return self._memory.add_norm(kernels, self._room, *given, **options)


def let_go(pads: Sequence[torch.Tensor], inbox: torch.Tensor, settle: Callable[[], object]) -> None:
    """End the waits of kernels. Torch's turn a zero of a pad, their own or another's, into a one, or a one of
    their own into a zero: all flags are ones and zeros in turn. Ours take what comes into the inbox. settle:
    waits until all is written.
    """
    end = time.monotonic() + LETTING_GO
    while time.monotonic() < end:
        for flag in (1, 0):
            for pad in pads:
                pad.fill_(flag)
            inbox.fill_(0)
            settle()


def _overwritten() -> torch.Tensor:
    raise NotCapturable("a sum of ranks is read behind the norm with which it was computed")


def end_waits(group: dist.ProcessGroup) -> None:
    """A rank of a group has failed: let the kernels of this process that wait for it come to their end, and
    begin no more of them.
    """
    _failed.add(group)
    memory = memory_of(group)
    if memory is not None:
        memory.end_waits()


def require_whole(group: dist.ProcessGroup | None) -> None:
    """Raise if a rank of a group has failed: what begins now would wait for it for ever."""
    if group in _failed:
        raise RuntimeError("a rank has failed, for which this would wait; end the processes, and start again")


def shots_of(ranks: int) -> list[int]:
    """The shots in which one kernel sums over so many ranks, of few bytes and of more."""
    one_shot, most = FUSED[ranks]
    return [1, 2] if 0 < one_shot < most else [1 if one_shot else 2]


def meet(group: dist.ProcessGroup | None) -> None:
    """Have the ranks of a group meet, if they sum in memory: a forward in which sums wait has broken off."""
    memory = None if group is None else memory_of(group)
    if memory is not None:
        memory.meet()


def memory_of(group: dist.ProcessGroup) -> SymmetricMemory | None:
    """The memory of a group's ranks, if made so far."""
    return _known.get(group)


def sums_of(group: dist.ProcessGroup) -> int:
    """How many sums the ranks of a group have begun here."""
    memory = memory_of(group)
    return 0 if memory is None else memory.sums


def symmetric_memory_of(group: dist.ProcessGroup) -> SymmetricMemory | None:
    """The memory of a group's ranks; None, on all of them, if they cannot. All ask together."""
    if not torch.cuda.is_available() or "nccl" not in dist.get_backend_config(group):
        return None
    if group not in _known:
        _known[group] = made_together(group, torch.device("cuda", torch.cuda.current_device()))
    return _known[group]


def symmetric_memories() -> list[torch.Tensor]:
    """The tensors that this process and other ranks write to and read."""
    return [each for memory in list(_known.values()) if memory is not None for each in memory.tensors]


def made_together(group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory | None:
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) > 1:
        return None
    found: list[SymmetricMemory] = []

    def make() -> None:
        found.append(SymmetricMemory(group, device))

    # It fails without links between devices; with 3 ranks, as torch's kernels sum over 2, 4 and 8.
    for act in (make, lambda: found[0].meet()):
        works = True
        try:
            act()
        except (ImportError, AttributeError, RuntimeError) as error:
            logger.info("ranks sum by NCCL alone: %s", error)
            works = False
        everywhere = torch.tensor([works], dtype=torch.int32, device=device)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
        if not everywhere.item():
            return None
    return found[0]
