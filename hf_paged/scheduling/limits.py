"""The limits of a step: the pools, and the budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..blocks import NEVER_FULL, BlockPool, LayerKind

NAMED = 16
"""Tokens of a name where no blocks become full."""


class KVCacheGroup(NamedTuple):
    """The pool of one kind of layers, and the host pool that its blocks are swapped to. Kinds that do not
    grow come last.
    """

    kind: LayerKind
    pool: BlockPool
    host: BlockPool | None = None

    def need(self, width: int, common: int, tokens: int, chunk: int, source: int) -> int:
        """The most blocks of `width` sequences of `tokens` tokens, the first `common` of them the same, that
        attend across to `source` (C11).
        """
        return self.kind.blocks_of_group(self.pool.block_size, width, common, tokens, chunk, source)


def finest(kv_groups: Sequence[KVCacheGroup]) -> int:
    """The number of the group with the smallest blocks of a sequence's own tokens: a token that fills a block
    of any group fills one of these.
    """
    own = [i for i, kv_group in enumerate(kv_groups) if kv_group.kind.grows]
    return min(own, key=lambda i: kv_groups[i].pool.block_size)


def name_size(kv_groups: Sequence[KVCacheGroup]) -> int:
    """The tokens of a name of a prompt: a full block of the smallest ones, where any become full."""
    size = kv_groups[finest(kv_groups)].pool.block_size
    return NAMED if size == NEVER_FULL else size


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
