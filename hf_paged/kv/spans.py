"""The index tensors of a captured step in which sequences bring several tokens: chunks of prompts and
decoding rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..blocks import BlockTable
from .static import LONGS, Ranks, StaticBatch

if TYPE_CHECKING:
    from .ops_torch import Ops


class StaticSpans(StaticBatch):
    """A `StaticBatch` whose rows are the tokens of at most `most` sequences, one sequence after the other.

    Sequences of one token come first: sequence i's is row i, which the decode kernel reads. The chunks after
    them have one table for all of their tokens.
    """

    def __init__(
        self,
        rows: int,
        most: int,
        width: int,
        block_size: int,
        columns: int,
        device: torch.device,
        window: int | None = None,
    ) -> None:
        self.most = most
        super().__init__(rows, 1, width, block_size, columns, device, window)

    def _parts(self) -> list[int]:
        return [LONGS, self.most * self.width, self.rows, self.rows, self.most, self.most + 1]

    def _take(self, parts: Sequence[torch.Tensor]) -> None:
        _, blocks, self.tokens, self._owners, self.totals, self.borders = parts
        self.blocks = blocks.view(self.most, self.width)
        """Block ids [most, width] of each sequence. `totals` [most]: its tokens with this step's; `borders`
        [most + 1]: its rows.
        """
        self.alone = self.totals
        """[most]: the same of sequences with one new token, 0 of others; this run's, once it has begun."""

    def spread(self, tables: Sequence[BlockTable], counts: Sequence[int], ranks: Ranks | None = None) -> None:
        """Upload a step in which sequence i has taken counts[i] tokens, after the ranks; those of one token
        come first.
        """
        _, ids, tokens, owners, totals, borders = self._stage()
        blocks, row = ids.reshape(self.most, self.width), 0
        if ranks is not None:
            row = ranks.enter(tokens, blocks, self.block_size)
            owners[:row], totals[:row], borders[:row] = range(row), tokens[:row] + 1, range(row)
        first, borders[row] = row, row
        for place, (table, count) in enumerate(zip(tables, counts, strict=True), first):
            blocks[place, table.released : table.end] = table.blocks
            tokens[row : row + count] = range(table.length - count, table.length)
            owners[row : row + count] = place
            totals[place] = table.length
            row += count
            borders[place + 1] = row
        totals[first + len(tables) :] = 0
        borders[first + len(tables) + 1 :] = row
        self._send()

    def begin(self, ops: Ops) -> None:
        """Begin a run: work out where the new tokens are written, and which sequences bring one."""
        self.step = object()
        self._visible.clear()
        there, at = self.tokens >= 0, self.tokens.clamp(min=0).long()
        self.seen.copy_(self.tokens + 1)
        owners = torch.where(there, self._owners, 0).long()
        blocks = self.blocks[owners, at // self.block_size]
        self._targets_of_step.copy_(torch.where(there, blocks * self.block_size + at % self.block_size, -1))
        self.alone = torch.where(self.borders.diff() == 1, self.totals, 0)

    def table(self, device: torch.device) -> torch.Tensor:
        """For plain torch: block ids [rows, width], int32."""
        return self.blocks[torch.where(self.tokens >= 0, self._owners, 0).long()]
