"""A column of a test's own, and a layer that reads it: a token of a marked row gets another vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from engine_answers import alone
from torch import nn

from hf_paged.blocks import COLUMNS, Column, ColumnFillers
from hf_paged.blocks.columns import Filler
from hf_paged.engine import Engine
from hf_paged.model.attention import running

MARK = Column("mark", per="token")
MARKS = 4
SEEN: list[list[int]] = []
"""The marks that forwards outside of captured steps have found."""


class Marked(nn.Module):
    """A layer that adds to its outputs a vector for each mark, nothing for 0."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        shifts = torch.randn(MARKS, width, generator=torch.Generator().manual_seed(5))
        shifts[0] = 0
        self.register_buffer("shifts", shifts)
        self.alone = 0
        """The mark of all rows in forwards of stock's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        step = running.get()
        marks = None
        if step is not None and MARK.name in COLUMNS:
            marks = step.column(MARK.name, x.device)
        if marks is None:
            return y + self.shifts[self.alone]
        if step is not None and step.cache.sequences.static is None:
            SEEN.append(marks.tolist())
        added = self.shifts[marks.long()]
        return y + (added[:, None] if len(marks) == len(x) else added)


def marked(model: Any) -> Any:
    """A llama whose first feed-forward layer reads marks."""
    layer = model.model.layers[0]
    layer.mlp = Marked(layer.mlp, model.config.hidden_size).to(model.device)
    return model


def with_mark(model: Any, mark: int, prompt: list[int], **options: Any) -> list[list[int]]:
    """Stock's answer to a prompt of that mark, alone."""
    layer: Marked = model.model.layers[0].mlp
    layer.alone = mark
    try:
        return alone(model, prompt, **options)
    finally:
        layer.alone = 0


def fillers_of(engine: Engine) -> ColumnFillers:
    """The fillers of an engine's columns."""
    return engine.runner.fillers


def by_request(marks: Sequence[int]) -> Filler:
    """The filler of the engine: the mark of each request, by the order in which they were submitted."""
    return lambda sequences: [marks[sequence.group.request.number] for sequence in sequences]
