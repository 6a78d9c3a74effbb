"""Blocks in the host's memory: gathered, copied while steps run, and put back into any free blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from ..blocks import BlockPool, Copy, LayerKind
from .checksums import Checksums
from .ordinary import ordinary_tensors
from .upload import upload

logger = logging.getLogger("hf_paged")

SLAB_BYTES = 1 << 27
"""The host's memory is taken in pieces of so much: pinning it takes time, some 0.3 s for a GB, and a small
load needs little.
"""
STAGING_BYTES = 1 << 25
"""Each of the two buffers on the device through which blocks travel."""


class Transfer(NamedTuple):
    """A transfer of some blocks of one store, measured."""

    out: bool
    bytes: int
    exposed: float
    """Seconds by which the steps came later for it."""
    copied: float
    """Seconds of the copy between device and host itself."""


class Swappable(Protocol):
    """A layer group, as far as its blocks on the host depend on it."""

    kind: LayerKind
    pool: BlockPool
    stores: dict[Any, Any]
    """Stores by layout: of keys and values, or of states."""
    tokens_behind: dict[int, int]

    @property
    def block_bytes(self) -> int: ...

    @property
    def layouts(self) -> dict[Any, int]: ...

    @property
    def checksums(self) -> Checksums | None: ...


class HostBlocks:
    """Room on the host for the blocks of one layer group: its books, and memory that grows with them.

    Block h lies in slab h // slab_blocks of every store's buffer. Copies run in the order of the plans: all
    blocks that leave are gathered on the stream of the steps before the next step writes anything, so they
    are free at once.
    """

    def __init__(self, group: Swappable, most: int) -> None:
        self.group = group
        self.most = most
        self.pool = BlockPool(0, group.pool.block_size)
        self.slab_blocks = max(1, min(most, SLAB_BYTES // max(1, group.block_bytes)))
        self.grown: Callable[[int], object] = lambda blocks: None
        """Called with the blocks that there is memory for, before any is used; may raise MemoryError."""
        self._buffers: dict[tuple[Any, int], _HostBuffer] = {}
        self._tokens_behind: dict[int, int] = {}
        """The number of tokens behind the state in each of its blocks."""

    @property
    def bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(buffer.bytes for buffer in self._buffers.values())

    def reserve(self, blocks: int) -> bool:
        """True if there is room for so many blocks more; memory for it is taken now, as far as it is allowed
        and there is any.
        """
        try:
            self._settle()
            while self.pool.available < blocks and self.pool.total < self.most:
                self._grow()
        except (MemoryError, RuntimeError) as error:
            self.most = self.pool.total
            logger.warning(
                "the host has no memory for more than %d swapped blocks of the %s layers (%s); requests "
                "beyond that are recomputed",
                self.most, self.group.kind.name, error,
            )  # fmt: skip
        return self.pool.available >= blocks

    def _settle(self) -> None:
        """Make a host buffer for every store as it is now. Blocks saved from another layout are stale and are
        never copied back.
        """
        kinds = [(store.layout, store.layers) for store in self.group.stores.values()] or list(
            self.group.layouts.items()
        )
        for kind in self._buffers.keys() - set(kinds):
            self._buffers.pop(kind).leave()
        for kind in kinds:
            if kind not in self._buffers:
                self._buffers[kind] = _HostBuffer(*kind, self.pool.block_size, self.slab_blocks)
            self._buffers[kind].have(-(-self.pool.total // self.slab_blocks))

    def _grow(self) -> None:
        slabs = self.pool.total // self.slab_blocks + 1
        for buffer in self._buffers.values():
            buffer.have(slabs)
        total = min(self.most, slabs * self.slab_blocks)
        self.grown(total)
        self.pool.grow(total)
        logger.info(
            "%d swapped blocks of the %s layers fit on the host now, %.1f MB",
            self.pool.total,
            self.group.kind.name,
            self.bytes / 1e6,
        )

    def out(self, copies: Sequence[Copy]) -> None:
        """Carry blocks of the device to the host."""
        if self.group.checksums is not None:
            self.group.checksums.leave(copies)
        for source, target in () if self.group.kind.fills else copies:
            self._tokens_behind[target] = self.group.tokens_behind.get(source, 0)
        for store in self.group.stores.values():
            self._buffers[store.layout, store.layers].out(store, copies)

    def back(self, copies: Sequence[Copy]) -> None:
        """Carry blocks of the host to the device."""
        for source, target in () if self.group.kind.fills else copies:
            self.group.tokens_behind[target] = self._tokens_behind.get(source, 0)
        self._settle()  # there may be another store since these blocks left
        for store in self.group.stores.values():
            self._buffers[store.layout, store.layers].back(store, copies)
        if self.group.checksums is not None:
            self.group.checksums.come_back(copies)

    def memory_of(self, block: int) -> list[torch.Tensor]:
        """The host's memory of a block: [elements of a block] of each store."""
        slab, row = divmod(block, self.slab_blocks)
        return [buffer.slabs[slab][row] for buffer in self._buffers.values()]

    def transfers(self) -> list[Transfer]:
        """The finished transfers that have not been reported yet."""
        return [transfer for buffer in self._buffers.values() for transfer in buffer.transfers()]

    def give_back(self) -> None:
        """Free the memory; the books keep their size, and the blocks that wait are lost."""
        for buffer in self._buffers.values():
            buffer.leave()
        self._buffers.clear()


class _Staging(NamedTuple):
    """A staging buffer on the device, and the events after which it may be read and written again."""

    data: torch.Tensor
    """[blocks, elements of a block]"""
    filled: _Event
    emptied: _Event


class _HostBuffer:
    """Copies one store's blocks to the host and back, through two buffers that take turns.

    On a CUDA device copies run on a stream of their own, one for both directions: copies to and from one
    place on the host keep their order. The stream of the steps waits for blocks that come back, and for a
    buffer only if both are in use.
    """

    def __init__(self, layout: Any, layers: int, block_size: int, slab_blocks: int) -> None:
        self.device = layout.device
        self.dtype = layout.dtype
        self.slab_blocks = slab_blocks
        self.elements: int = layers * layout.block_bytes(block_size) // layout.dtype.itemsize
        self.slabs: list[torch.Tensor] = []
        """Each [slab_blocks, elements of a block]."""
        self.batch = max(1, min(slab_blocks, STAGING_BYTES // max(1, self.elements * self.dtype.itemsize)))
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._staging: list[_Staging] = []
        self._turn = 0
        self._measured: list[_Measured] = []

    @property
    def bytes(self) -> int:
        return len(self.slabs) * self.slab_blocks * self.elements * int(self.dtype.itemsize)

    def have(self, slabs: int) -> None:
        """Take memory until there are `slabs` slabs, and the buffers."""
        with ordinary_tensors():
            while len(self._staging) < 2:
                data = torch.empty(self.batch, self.elements, dtype=self.dtype, device=self.device)
                self._staging.append(_Staging(data, _Event(self.device), _Event(self.device)))
            while len(self.slabs) < slabs:
                slab = torch.empty(
                    self.slab_blocks,
                    self.elements,
                    dtype=self.dtype,
                    device="cpu",
                    pin_memory=self._side is not None,
                )
                if self._side is None:
                    slab.zero_()  # pageable memory is not allocated before it is written; pinned memory is
                self.slabs.append(slab)

    def leave(self) -> None:
        """Make later users of the device's memory wait for copies in progress."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    # ---- transfers

    def out(self, store: Any, copies: Sequence[Copy]) -> None:
        """Gather blocks copies[i].source of the store, and copy them to the host's blocks
        copies[i].target.
        """
        for part in self._parts(sorted(copies, key=lambda copy: copy.target)):
            watch = _Measured(self, out=True, blocks=len(part))
            buffer = self._next()
            buffer.emptied.wait()
            blocks = upload([copy.source for copy in part], self.device)
            for data, target in _split(buffer.data[: len(part)], store):
                target.copy_(data.index_select(1, blocks).transpose(0, 1))
            buffer.filled.note()
            watch.ended.note()
            with self._aside():
                buffer.filled.wait()
                watch.copying.note()
                for begin, end, slab in self._runs([copy.target for copy in part]):
                    slab.copy_(buffer.data[begin:end], non_blocking=True)
                watch.copied.note()
                buffer.emptied.note()
            self._measured.append(watch)

    def back(self, store: Any, copies: Sequence[Copy]) -> None:
        """Copy the host's blocks copies[i].source to the device, and put them into blocks copies[i].target of
        the store.
        """
        for part in self._parts(sorted(copies, key=lambda copy: copy.source)):
            watch = _Measured(self, out=False, blocks=len(part))
            buffer = self._next()
            with self._aside():
                buffer.emptied.wait()
                watch.copying.note()
                for begin, end, slab in self._runs([copy.source for copy in part]):
                    buffer.data[begin:end].copy_(slab, non_blocking=True)
                watch.copied.note()
                buffer.filled.note()
            buffer.filled.wait()
            blocks = upload([copy.target for copy in part], self.device)
            for data, source in _split(buffer.data[: len(part)], store):
                data.index_copy_(1, blocks, source.transpose(0, 1))
            buffer.emptied.note()
            watch.ended.note()
            self._measured.append(watch)

    def transfers(self) -> list[Transfer]:
        """Measured transfers that are over."""
        over = [watch for watch in self._measured if watch.over]
        self._measured = [watch for watch in self._measured if not watch.over]
        return [watch.transfer() for watch in over]

    def _parts(self, copies: list[Copy]) -> Iterator[list[Copy]]:
        for begin in range(0, len(copies), self.batch):
            yield copies[begin : begin + self.batch]

    def _next(self) -> _Staging:
        self._turn = 1 - self._turn
        return self._staging[self._turn]

    def _runs(self, blocks: list[int]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Ascending blocks of the host as stretches that lie in one piece: from place to place in the list,
        and the memory.
        """
        begin = 0
        for place in range(1, len(blocks) + 1):
            first = blocks[begin]
            length = place - begin
            if (
                place < len(blocks)
                and blocks[place] == first + length
                and blocks[place] // self.slab_blocks == first // self.slab_blocks
            ):
                continue
            row = first % self.slab_blocks
            yield begin, place, self.slabs[first // self.slab_blocks][row : row + length]
            begin = place

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)


class _Event:
    """A point in the work of one stream that another can wait for; on a CPU everything is done in order
    anyway.
    """

    def __init__(self, device: torch.device, timed: bool = False) -> None:
        self.device = device
        self._event = torch.cuda.Event(enable_timing=timed) if device.type == "cuda" else None
        self._time = 0.0

    def note(self) -> None:
        """It is now, on the current stream."""
        if self._event is None:
            self._time = time.perf_counter()
        else:
            self._event.record(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Make later work of the current stream wait for it; the host does not wait. An event that was never
        recorded makes nothing wait.
        """
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)

    @property
    def over(self) -> bool:
        return self._event is None or self._event.query()

    def since(self, other: _Event) -> float:
        """Seconds from the other moment to this one, both over."""
        if self._event is None or other._event is None:
            return self._time - other._time
        return float(other._event.elapsed_time(self._event)) / 1e3


class _Measured:
    """A transfer while it is measured: it holds up the steps until it `ended`, and its blocks are copied from
    `copying` to `copied`.
    """

    def __init__(self, buffer: _HostBuffer, out: bool, blocks: int) -> None:
        self.is_out = out
        self.bytes = blocks * buffer.elements * buffer.dtype.itemsize
        self.begun, self.ended, self.copying, self.copied = (
            _Event(buffer.device, timed=True) for _ in range(4)
        )
        self.begun.note()

    @property
    def over(self) -> bool:
        return self.ended.over and self.copied.over

    def transfer(self) -> Transfer:
        exposed = self.ended.since(self.begun)
        if self.begun.device.type == "cpu":  # the copies run between the steps: all of their time is exposed
            exposed = max(exposed, self.copied.since(self.begun))
        return Transfer(self.is_out, self.bytes, exposed, self.copied.since(self.copying))


def _split(rows: torch.Tensor, store: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of a store [layers, blocks, elements], and those of rows [blocks, elements] that hold as many
    [blocks, layers, elements], views.
    """
    begin = 0
    for data in store.by_block:
        layers, _, elements = data.shape
        end = begin + layers * elements
        yield data, rows[:, begin:end].unflatten(1, (layers, elements))
        begin = end
