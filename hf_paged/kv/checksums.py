"""Checksums of blocks: taken when a block is written no more, compared when it is shared, copied, swapped or
evicted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from ..blocks import BlockPool, Copy, Corruption, Due, SealedBlocks
from .ordinary import ordinary_tensors
from .static import download
from .upload import upload

logger = logging.getLogger("hf_paged")

CHUNK_BYTES = 1 << 25
"""Blocks of so many bytes are read at once."""
NONE = torch.iinfo(torch.int32).max
"""The number of the first layer that differs, where none does."""
MIX = 0x1E3779B97F4A7C15
LOW = 0xFFFFFFFF
WORDS = (torch.int64, torch.int32, torch.int16)
Sums = dict[Any, torch.Tensor]
"""By layout the checksums [layers, blocks] of some blocks."""
Agree = Callable[[torch.Tensor], torch.Tensor]


class CorruptedBlock(RuntimeError):
    """The bytes of a block are not those that were computed: `verify="bytes"` has found it."""

    @classmethod
    def of(cls, found: Corruption, what: str, then: str) -> CorruptedBlock:
        """The error of a request, or a call of generate(), that holds the block."""
        return cls(
            f"{found}; {what} may be wrong, so {then}. Something else has written there, or the memory is "
            "faulty: run with compute-sanitizer, look at the device's ECC counters"
        )


class ByteChecks(NamedTuple):
    """Work before a step's writes, for every layer group: blocks to compare with their checksums, and blocks
    to take checksums of.
    """

    due: tuple[tuple[Due, ...], ...] = ()
    fresh: tuple[tuple[int, ...], ...] = ()

    def __bool__(self) -> bool:
        return any(self.due) or any(self.fresh)


NO_CHECKS = ByteChecks()


class Summed(Protocol):
    """A layer group, as far as checksums of its blocks depend on it."""

    pool: BlockPool
    stores: dict[Any, Any]

    @property
    def title(self) -> str: ...

    def layer_numbers(self, layout: Any) -> list[int]: ...


class _Compared(NamedTuple):
    """Blocks that were compared on the device. first: for each the first layer that differs, [blocks]."""

    due: tuple[Due, ...]
    first: torch.Tensor


class Checksums:
    """The checksums of one layer group, on its devices. The host waits only where `found` reads a result."""

    def __init__(self, group: Summed, by_call: bool = False) -> None:
        self._group = group
        self._sums: Sums = {}
        self._on_host: Sums = {}
        """Those of the blocks that wait in the host's memory."""
        self.by_call = by_call
        """True if only the end of a call raises, where all of its ranks do."""
        self._compared: list[_Compared] = []
        self._arriving: list[tuple[tuple[Due, ...], Callable[[], Sequence[torch.Tensor]]]] = []

    @property
    def sealed(self) -> SealedBlocks:
        """The books of it, beside the pool's."""
        sealed = self._group.pool.sealed
        assert sealed is not None
        return sealed

    # ---- on the device, in the order of its work

    def take(self, blocks: Sequence[int]) -> None:
        """Take the checksums of blocks that no step writes any more."""
        if blocks:
            self._put(self._sums, blocks, self._group.pool.total, self._sums_of(blocks))
            if self._group.pool.sealed is not None:
                self._group.pool.sealed.sum(blocks)

    def compare(self, due: tuple[Due, ...]) -> None:
        """Compare blocks with their checksums."""
        if due:
            blocks = [each.block for each in due]
            self._compare(due, self._sums_of(blocks), self._get(self._sums, blocks))

    @contextmanager
    def copying(self, copies: Sequence[Copy]) -> Iterator[None]:
        """Within, blocks are copied: each copy is compared with its source."""
        before = self._sums_of([copy.source for copy in copies])
        yield
        targets = [copy.target for copy in copies]
        due = tuple([Due(block, "copied", block) for block in targets])
        self._compare(due, self._sums_of(targets), before)

    def leave(self, copies: Sequence[Copy]) -> None:
        """Take the checksums of blocks that go to the host."""
        targets = [copy.target for copy in copies]
        sums = self._sums_of([copy.source for copy in copies])
        self._put(self._on_host, targets, 1 << max(targets).bit_length(), sums)

    def come_back(self, copies: Sequence[Copy]) -> None:
        """Compare blocks that have come from the host with their checksums from before."""
        before = self._get(self._on_host, [copy.source for copy in copies])
        targets = [copy.target for copy in copies]
        due = tuple([Due(block, "swapped in", block) for block in targets])
        self._compare(due, self._sums_of(targets), before)

    def forget(self) -> None:
        """Forget all results: the step of these blocks broke off."""
        self._compared.clear()
        self._arriving.clear()

    # ---- results

    def launch(self, agree: Agree | None = None) -> None:
        """Bring the results so far to the host. agree: makes them those of all ranks."""
        if not self._compared:
            return
        due = tuple([each for compared in self._compared for each in compared.due])
        first = torch.cat([compared.first for compared in self._compared])
        self._compared.clear()
        self._arriving.append((due, download([first if agree is None else agree(first)])))

    def found(self, latest: bool = True) -> list[Corruption]:
        """The blocks that differ: they are named no more, and their holders can be found as spoiled. latest:
        whether to wait for those that were launched last, too.
        """
        keep = 0 if latest else 1
        found = []
        while len(self._arriving) > keep:
            due, wait = self._arriving.pop(0)
            self._group.pool.counts["checked"] += len(due)
            layers = wait()[0].tolist()
            wrong = [pair for pair in zip(due, layers, strict=True) if pair[1] != NONE]
            found += [self._spoil(*pair) for pair in wrong]
        return found

    def _spoil(self, due: Due, layer: int) -> Corruption:
        """Have no prompt find a block that differs, nor what was copied from it, and note which of these are
        held.
        """
        pool = self._group.pool
        found = Corruption(self._group.title, due.block, due.event, layer, due.heir)
        logger.error("verify='bytes': %s", found)
        pool.counts["mismatched"] += 1
        blocks = {due.heir} if due.event in ("copied", "swapped in") else set()
        if due.block in self.sealed:  # else other content is there by now
            blocks.add(due.block)
        for block in blocks:
            pool.discard(block)
        self.sealed.spoil([block for block in blocks if pool.references(block)], found)
        return found

    # ---- checksums

    def _sums_of(self, blocks: Sequence[int]) -> Sums:
        found = {}
        for layout, store in self._group.stores.items():
            ids = upload(list(blocks), layout.device)
            found[layout] = checksums(store.by_block, ids)
        return found

    def _put(self, sums: Sums, blocks: Sequence[int], total: int, new: Sums) -> None:
        for layout, own in new.items():
            held = sums.get(layout)
            if held is None or held.shape[0] != own.shape[0] or held.shape[1] < total:
                with ordinary_tensors():
                    more = torch.zeros(own.shape[0], total, dtype=torch.int64, device=own.device)
                if held is not None and held.shape[0] == own.shape[0]:
                    more[:, : held.shape[1]] = held
                held = sums[layout] = more
            held.index_copy_(1, upload(list(blocks), own.device), own)

    def _get(self, sums: Sums, blocks: Sequence[int]) -> Sums:
        return {
            layout: held.index_select(1, upload(list(blocks), held.device)) for layout, held in sums.items()
        }

    def _compare(self, due: tuple[Due, ...], now: Sums, before: Sums) -> None:
        """Find the first layer in which checksums differ."""
        first: torch.Tensor | None = None
        for layout, own in now.items():
            if layout not in before:
                continue  # its layers have come since
            numbers = upload(self._group.layer_numbers(layout), own.device, torch.int32)[: len(own), None]
            differ = torch.where(own != before[layout], numbers, NONE).amin(0)
            first = differ if first is None else torch.minimum(first, differ.to(first.device))
        if first is not None:
            self._compared.append(_Compared(due, first))


def checksums(parts: Sequence[torch.Tensor], blocks: torch.Tensor) -> torch.Tensor:
    """Checksums int64 [layers, ids] of blocks [ids]. parts: their content, each [layers, blocks, elements].

    A word is multiplied by an odd number of its position, its halves are mixed, it is multiplied once more,
    and all are added up. Each change of one word gives another sum.
    """
    total = torch.zeros(parts[0].shape[0], len(blocks), dtype=torch.int64, device=blocks.device)
    for place, part in enumerate(part for part in parts if part.shape[2]):
        words = _words(part)
        size = words.shape[2]
        factors = _factors(place * size, size, part.device)
        bytes_of = 8 * max(1, size) * words.shape[0]
        begin = 0
        for ids in blocks.split(max(1, CHUNK_BYTES // bytes_of)):
            mixed = words.index_select(1, ids).to(torch.int64).mul_(factors)
            mixed ^= (mixed >> 32).bitwise_and_(LOW)
            total[:, begin : begin + len(ids)] += mixed.mul_(factors).sum(-1)
            begin += len(ids)
    return total


@functools.lru_cache(64)
def _factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """An odd number for each of so many positions."""
    with ordinary_tensors():
        places = torch.arange(first, first + count, dtype=torch.int64, device=device)
        return (2 * places + 1) * MIX


def _words(part: torch.Tensor) -> torch.Tensor:
    """A part [layers, blocks, elements] as integers, the widest that its rows are made of."""
    for dtype in WORDS:
        wide = dtype.itemsize
        lengths = (part.shape[2], part.storage_offset(), *part.stride()[:2])
        if all(length * part.itemsize % wide == 0 for length in lengths):
            return part.view(dtype)
    return part.view(torch.uint8)


def flip_a_byte(store: Any, block: int, layer: int = 0, byte: int = 0) -> None:
    """Change one byte of a block on the device, as faulty memory would: for tests of the checks."""
    store.by_block[0][layer, block].view(torch.uint8)[byte] ^= 0x10
