"""The limits of a step: the pools, and the budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..blocks import BlockPool


class KVCacheGroup(NamedTuple):
    """The pool of one kind of layer, the window of those layers, and the host pool that its blocks are
    swapped to.

    cross: whether they attend across, to the output of a request's encoder or to its pictures: a length that
    is fixed from the request's first step, and 0 for a request without. It is the last group.
    """

    pool: BlockPool
    window: int | None = None
    host: BlockPool | None = None
    cross: bool = False

    def row_blocks(self, tokens: int, chunk: int) -> int:
        """The most blocks that a sequence of `tokens` tokens holds when it grows by up to `chunk` at a time
        (C10).
        """
        blocks = self.pool.blocks_for(tokens)
        if self.window is None:
            return blocks
        return min(blocks, self.pool.blocks_for(self.window - 1 + max(1, min(chunk, tokens))) + 1)


@dataclass(frozen=True)
class Limits:
    """The budgets of a step and of the batch.

    tokens: the most tokens of one step. sequences: the most that run at once; a step must be able to hold one
    token of each. watermark: the share of every pool that admission leaves free for running sequences.
    """

    tokens: int
    sequences: int
    watermark: float = 0.01

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError(f"a batch of {self.sequences} sequences can run nothing; give 1 or more")
        if self.tokens < self.sequences:
            raise ValueError(
                f"a step of {self.tokens} tokens cannot hold one token of each of {self.sequences} "
                "sequences; raise the token budget or lower the sequence budget"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark={self.watermark} is not in [0, 1); 0.01 is a good choice")

    def reserve(self, kv_group: KVCacheGroup) -> int:
        """The blocks of a pool that a new request must leave available."""
        return int(self.watermark * kv_group.pool.total)
