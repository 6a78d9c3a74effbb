"""The index tensors of a captured step in which sequences bring several tokens: chunks of prompts and
decoding rows together.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import torch

from ..blocks import BlockTableArray, SharedReads
from .batch import SpanTensors
from .static import StaticBatch, UploadPart, fill_groups, tokens_of


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
        shared: SharedReads | None = None,
    ) -> None:
        self.most = most
        super().__init__(rows, 1, width, block_size, columns, device, window, shared)
        parts = self.uploaded.parts
        self._owners = parts["owners"]
        self.spans: SpanTensors = SpanTensors(
            parts["table"], parts["totals"], parts["borders"], parts["totals"]
        )

    def _parts(self) -> list[UploadPart]:
        """The parts of an upload: the columns before and after the step; the blocks of every sequence; the
        position of every token (-1: it is not there) and its sequence; the tokens of every sequence with this
        step's, and where its own begin.
        """
        return [
            UploadPart("columns", (2,), torch.long),
            UploadPart("table", (self.most, self.width)),
            UploadPart("tokens", (self.rows,), empty=-1),
            UploadPart("owners", (self.rows,)),
            UploadPart("totals", (self.most,)),
            UploadPart("borders", (self.most + 1,)),
        ]

    def load_array(
        self, tables: BlockTableArray, row_ids: array[int], starts: array[int], counts: array[int]
    ) -> None:
        """Upload a step in which row_ids[i] has taken counts[i] tokens after starts[i]; rows of one token
        come first.
        """
        rows = np.asarray(row_ids)
        many = np.asarray(counts)
        before = np.asarray(starts)
        places, positions = tokens_of(np.arange(len(rows)), before, counts)
        width = int(positions.max()) // self.block_size + 1
        blocks = np.asarray(tables.ids).reshape(tables.height, tables.width)
        with self.uploaded.filled() as parts:
            parts["table"][: len(rows), :width] = blocks.take(rows, 0)[:, :width]
            parts["tokens"][: len(places)] = positions
            parts["owners"][: len(places)] = places
            totals, borders = parts["totals"], parts["borders"]
            totals[: len(rows)] = before + many
            totals[len(rows) :] = 0
            borders[0] = 0
            borders[1 : len(rows) + 1] = many.cumsum()
            borders[len(rows) + 1 :] = len(places)
            if self.shared is not None:
                fill_groups(parts, self.shared.follow_singles(tables, row_ids, starts, counts))

    def begin(self, advance: Callable[..., None]) -> None:
        """Begin a run: work out where the new tokens are written, and which sequences bring one."""
        self._begin()
        there = self.tokens >= 0
        at = self.tokens.clamp(min=0).long()
        self.seen.copy_(self.tokens + 1)
        owners = torch.where(there, self._owners, 0).long()
        blocks = self.spans.table[owners, at // self.block_size]
        self._targets_of_step.copy_(torch.where(there, blocks * self.block_size + at % self.block_size, -1))
        alone = torch.where(self.spans.borders.diff() == 1, self.spans.totals, 0)
        self.spans = self.spans._replace(alone=alone)

    def table(self, device: torch.device) -> torch.Tensor:
        """For plain torch, which reads every row by itself."""
        table = self.spans.table[torch.where(self.tokens >= 0, self._owners, 0).long()]
        return table.to(device)

    def spans_on(self, device: torch.device) -> SpanTensors:
        return SpanTensors(*[self._on(device, part) for part in self.spans])
