"""Log-probabilities of prompts' tokens, kept beside the blocks that hold these tokens."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from .pool import BlockPool

MOST_BYTES = 2**25
"""Most bytes of the numbers of all blocks; the least recently used go first."""


class _BlockScores(NamedTuple):
    """The numbers of one block's tokens, `width` for each. naming: what the pool knew the block by."""

    naming: object
    width: int
    numbers: array[float]


class PromptScores:
    """The numbers known about tokens of full blocks, by the blocks' digests: a prompt whose tokens are scored
    need not be computed where its blocks and their numbers are there.

    A digest determines its block's tokens and all before them, so it determines their numbers, too. Numbers
    count only while the pool still has the naming of the block that they came with: they cease with its keys
    and values, whyever these do.
    """

    def __init__(self, pool: BlockPool, most_bytes: int = MOST_BYTES) -> None:
        self._pool = pool
        self._most_bytes = most_bytes
        self._entries: OrderedDict[bytes, _BlockScores] = OrderedDict()
        self.bytes = 0

    def known(self, digests: Sequence[bytes], width: int) -> int:
        """How many leading blocks of a prompt have at least `width` numbers for each token."""
        for count, digest in enumerate(digests):
            entry = self._entries.get(digest)
            if entry is None or entry.width < width or entry.naming is not self._pool.names.naming(digest):
                return count
        return len(digests)

    def add(self, digest: bytes, rows: Sequence[Sequence[float]]) -> None:
        """Keep equally many numbers for each token of a block, if the pool has the block."""
        naming = self._pool.names.naming(digest)
        if naming is None:
            return
        width = len(rows[0])
        old = self._entries.get(digest)
        if old is not None and old.naming is naming and old.width >= width:
            self._entries.move_to_end(digest)
            return
        self._drop(digest)
        numbers = array("d", [number for row in rows for number in row])
        self._entries[digest] = _BlockScores(naming, width, numbers)
        self.bytes += len(numbers) * numbers.itemsize
        while self.bytes > self._most_bytes:
            self._drop(next(iter(self._entries)))

    def rows(self, digest: bytes) -> list[array[float]]:
        """The numbers of each token of a block that is known."""
        self._entries.move_to_end(digest)
        _, width, numbers = self._entries[digest]
        return [numbers[i : i + width] for i in range(0, len(numbers), width)]

    def _drop(self, digest: bytes) -> None:
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self.bytes -= len(entry.numbers) * entry.numbers.itemsize
