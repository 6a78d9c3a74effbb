"""Checks that a model's tensors are unchanged: some words of each at every look, in turns all of them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..kv.ops import digester
from ..kv.upload import upload

GOLDEN = -7046029254386353131
"""A word's factor depends on its place: word i is multiplied with (i * GOLDEN) | 1."""
SAMPLES = 1024
"""Words of a large tensor that every look reads, evenly spread."""
SMALL = 4096
"""A tensor of at most so many words is read whole."""
PIECE = 2**20
"""Words that are boiled down to one number, in turns."""
TURN = {"cuda": 512 * 2**20, "cpu": 32 * 2**20}
"""Bytes of a device that one look reads beside the samples: smaller models are read whole every time."""
HASHED = 16 * 2**20
"""Bytes of a piece of a tensor whose digest a thread of its own takes."""
PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""Kinds of tensors that are one piece of memory; others are asked."""
_version_of = attrgetter("_version")
Place = tuple[torch.device, bool]
"""A device, and whether what lies there is read by address."""


class Unreadable(Exception):
    """A tensor whose content cannot be read: it has no memory of its own."""


def version_of(tensor: torch.Tensor) -> int:
    """How often torch has counted a write to a tensor; made in inference mode it counts none."""
    return 0 if tensor.is_inference() else tensor._version


def tensor_facts(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The host's facts about tensors without asking devices: which, where, how often torch wrote to them."""
    return tuple(map(id, tensors)), tuple(map(_facts, tensors))


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    if wraps(tensor):
        return tuple(_facts(part) for part in tensors_in(tensor))
    return version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`version_of` each of them. In bulk, for every step."""
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:  # of some that were made in inference mode nothing is counted
        return list(map(version_of, tensors))


class Sample(NamedTuple):
    """Words of a part: `words` of them from word `first` on, `step` words apart."""

    part: int
    first: int
    words: int
    step: int


class Reading(NamedTuple):
    """Digests of some pieces in one place, perhaps still on their way."""

    kv_group: DeviceParts
    ranges: list[tuple[int, int]]
    numbers: torch.Tensor | list[int]
    arrived: torch.cuda.Event | None = None

    def fetch(self) -> list[int]:
        """The numbers, once they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.numbers if isinstance(self.numbers, list) else list(self.numbers.tolist())


class Contents:
    """Contents of tensors, digested to a number for each piece when this is made; later looks read some
    pieces again.

    A look costs a launch or two. It sees every change of a small tensor and of a word that is sampled, hence
    whatever changes a tensor everywhere, and it sees any other change when its turn comes: after `turns`
    looks at the latest.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._by_hand = [
            i
            for i, tensor in enumerate(tensors)
            if any(not by_address for _, by_address in _by_place([tensor]))
        ]
        self._kv_groups = {place: DeviceParts(parts, place) for place, parts in _by_place(tensors).items()}
        self._baseline = self._read([kv_group.due(0, whole=True) for kv_group in self._kv_groups.values()])
        self._known: dict[DeviceParts, list[int]] = {}
        self._looks = 0

    @property
    def turns(self) -> int:
        """After how many looks everything was read again."""
        return max((len(kv_group.turns) for kv_group in self._kv_groups.values()), default=1)

    def look(self, tensors: Sequence[torch.Tensor], whole: bool = False) -> list[Reading]:
        """Begin to read some of it again, or all. The tensors must be those of before, where they were."""
        self._looks += 1
        for place, parts in _by_place([tensors[i] for i in self._by_hand]).items():
            self._kv_groups[place].parts = parts
        due = [kv_group.due(self._looks, whole) for kv_group in self._kv_groups.values()]
        return self._read(due)

    def _read(self, ranges: list[list[tuple[int, int]]]) -> list[Reading]:
        readings = [
            kv_group.read(due) for kv_group, due in zip(self._kv_groups.values(), ranges, strict=True)
        ]
        for kv_group in self._kv_groups.values():
            kv_group.parts = []  # a reading must not keep weights alive
        return readings

    def same(self, readings: Sequence[Reading]) -> bool:
        """Wait for what was read; whether it is what it was."""
        if not self._known:
            self._known = {reading.kv_group: reading.fetch() for reading in self._baseline}
        for reading in readings:
            known = self._known[reading.kv_group]
            if reading.fetch() != [number for begin, end in reading.ranges for number in known[begin:end]]:
                return False
        return True


class DeviceParts:
    """The parts that lie in one place, in pieces: first a sample of each, then all of the large ones."""

    def __init__(self, parts: list[torch.Tensor], place: Place) -> None:
        self.device, by_address = place
        self.parts = parts
        lengths = (
            [part.nbytes // 4 for part in parts] if by_address else [_words(part).numel() for part in parts]
        )
        # What the host reads whole at every look needs no samples.
        whole = hashes(self.device) and 4 * sum(lengths) <= TURN["cpu"]
        steps = [1 if whole or words <= SMALL else words // SAMPLES for words in lengths]
        self.pieces = [
            Sample(i, 0, words if step == 1 else SAMPLES, step)
            for i, (words, step) in enumerate(zip(lengths, steps, strict=True))
        ]
        self.samples = len(self.pieces)
        self.turns: list[tuple[int, int]] = []
        self._cut(
            [(i, words) for i, (words, step) in enumerate(zip(lengths, steps, strict=True)) if step > 1]
        )
        self._kernel = digester(self.device) if by_address else None
        self._table: torch.Tensor | None = None
        self._weights: torch.Tensor | None = None
        if self._kernel is not None:
            firsts = [parts[piece.part].data_ptr() + 4 * piece.first for piece in self.pieces]
            self._table = upload(
                [firsts, [piece.words for piece in self.pieces], [piece.step for piece in self.pieces]],
                self.device,
            )

    def _cut(self, large: list[tuple[int, int]]) -> None:
        """Cut large parts (number, words) into pieces, and these into turns."""
        begin = len(self.pieces)
        size = 0
        for part, words in large:
            for first in range(0, words, PIECE):
                count = min(PIECE, words - first)
                if size and size + 4 * count > TURN.get(self.device.type, TURN["cpu"]):
                    self.turns.append((begin, len(self.pieces)))
                    begin = len(self.pieces)
                    size = 0
                self.pieces.append(Sample(part, first, count, 1))
                size += 4 * count
        if size:
            self.turns.append((begin, len(self.pieces)))

    def due(self, look: int, whole: bool) -> list[tuple[int, int]]:
        """The pieces that a look reads: the samples, and those whose turn it is."""
        if whole:
            return [(0, len(self.pieces))]
        return [(0, self.samples), *([self.turns[look % len(self.turns)]] if self.turns else [])]

    def read(self, ranges: list[tuple[int, int]]) -> Reading:
        """Begin to boil down the pieces of one or two ranges."""
        pieces = [self.pieces[i] for begin, end in ranges for i in range(begin, end)]
        if self._kernel is not None and self._table is not None:
            numbers = self._kernel(self._table, ranges)
        elif hashes(self.device):
            return Reading(self, ranges, [self._hash(piece) for piece in pieces])
        else:
            numbers = torch.stack([self._boil_down(piece) for piece in pieces])
        if numbers.device.type != "cuda":
            return Reading(self, ranges, numbers)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(numbers.device))
        return Reading(self, ranges, host, arrived)

    def _boil_down(self, piece: Sample) -> torch.Tensor:
        if self._weights is None:
            longest = max(piece.words for piece in self.pieces)
            self._weights = (torch.arange(longest, device=self.device) * GOLDEN) | 1
        return (self._read(piece).long() * self._weights[: piece.words]).sum()

    def _hash(self, piece: Sample) -> int:
        # Python's own, of 64 bits under a key of the process: hashlib's take several times as long.
        return hash(host_bytes(self._read(piece)))

    def _read(self, piece: Sample) -> torch.Tensor:
        return _words(self.parts[piece.part])[piece.first :: piece.step][: piece.words]


def content_digest(entries: Iterable[tuple[object, Iterable[torch.Tensor]]]) -> bytes:
    """A digest of tensors and of the facts that belong to each few of them, the same in every process."""
    digest = blake2b(digest_size=32)
    for facts, tensors in entries:
        digest.update(repr(facts).encode())
        for each in tensors:
            digest.update(repr(each.dtype).encode())
            part = each.detach().cpu().contiguous()
            digest.update(host_bytes(part) if part.nbytes <= HASHED else _digests_of_pieces(part))
    return digest.digest()


def _digests_of_pieces(part: torch.Tensor) -> bytes:
    """The digests of a large tensor's pieces, taken side by side: one thread reads some 500 MB a second."""
    held = memoryview((ctypes.c_char * part.nbytes).from_address(part.data_ptr()))
    pieces = [held[begin : begin + HASHED] for begin in range(0, part.nbytes, HASHED)]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1)) as threads:
        return b"".join(threads.map(lambda piece: blake2b(piece, digest_size=32).digest(), pieces))


def host_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of what a tensor holds. Its storage stays as it is: `numpy()` would make it one that can never
    be resized again.
    """
    part = tensor.detach().cpu().contiguous()
    return ctypes.string_at(part.data_ptr(), part.nbytes) if part.nbytes else b""


def hashes(device: torch.device) -> bool:
    """True if the host itself reads what lies on `device`."""
    return device.type == "cpu"


def _by_place(tensors: Sequence[torch.Tensor]) -> dict[Place, list[torch.Tensor]]:
    places: dict[Place, list[torch.Tensor]] = {}
    for tensor in tensors:
        for part, moved in _parts(tensor.detach()):
            by_address = (
                not moved
                and digester(part.device) is not None
                and part.nbytes % 4 == 0
                and part.data_ptr() % 4 == 0
            )
            places.setdefault((part.device, by_address), []).append(part)
    return places


def wraps(tensor: torch.Tensor) -> bool:
    """True if a tensor consists of others, and has no memory of its own: a quantized one, a rank's shard."""
    return type(tensor) not in PLAIN_TENSORS and hasattr(tensor, "__tensor_flatten__")


def tensors_in(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that one consists of. A shard names its mesh of ranks beside its own part."""
    names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]  # a subclass
    parts = [getattr(tensor, name) for name in names]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def memory_of_parts(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """The tensors with memory inside those of several that consist of others; none of a plain model."""
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor is None or type(tensor) in PLAIN_TENSORS:
            continue
        own: Any = getattr(tensor, "_local_tensor", None)
        if type(own) in PLAIN_TENSORS:  # a rank's shard: of hundreds of weights, in every step
            found.append(own)
        elif wraps(tensor):
            parts = tensors_in(tensor)
            found += [part for part in parts if not wraps(part)] + memory_of_parts(parts)
    return found


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory, the same for all tensors over it."""
    return tensor.untyped_storage().data_ptr()


def storages_of(tensor: torch.Tensor) -> list[StorageWeakRef]:
    """Weak references to the memory of a tensor, in all its parts.

    A weak reference to the tensor itself would forbid torch to swap it, as `Module.to` does with quantized
    weights.
    """
    parts = memory_of_parts([tensor]) if wraps(tensor) else [tensor]
    return [StorageWeakRef(part.untyped_storage()) for part in parts]


def _parts(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
    """The plain tensors of a tensor, in the order of their memory, and whether they had to be copied."""
    if wraps(tensor):
        for part in tensors_in(tensor):
            yield from _parts(part.detach())
        return
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        raise Unreadable(f"a tensor {list(tensor.shape)} on {tensor.device} has no memory to read")
    if tensor.numel():
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
        part = tensor.permute(order).contiguous()
        yield part, part.data_ptr() != tensor.data_ptr()


def _words(part: torch.Tensor) -> torch.Tensor:
    """Its memory as integers, as wide as they fit."""
    flat = part.reshape(-1)
    for word in (torch.int32, torch.int16, torch.int8):
        if part.nbytes % word.itemsize == 0 and part.storage_offset() * part.itemsize % word.itemsize == 0:
            return flat.view(word)
    raise Unreadable(f"a tensor {list(part.shape)} of {part.dtype} cannot be read as words")
