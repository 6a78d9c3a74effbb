"""The logits of a forward for the sequences that are sampled, and where captured steps write them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from ...scheduling import TokenSequence
from .warp import best


class Answer(NamedTuple):
    """The logits that follow the last tokens of some sequences, and the greedy choice among them where a
    captured step has made it.

    Those of a captured step are its own memory: the next step writes over them.
    """

    logits: torch.Tensor
    """[sequences, vocabulary] in fp32"""
    best: torch.Tensor | None = None
    """[2, sequences], as `best` makes it of the logits."""
    scores: Mapping[TokenSequence, torch.Tensor] = MappingProxyType({})
    """Of sequences whose prompts are scored, the numbers of the tokens behind the first of their rows."""

    def first(self, count: int) -> Answer:
        """The answer for the first `count` sequences."""
        return Answer(self.logits[:count], None if self.best is None else self.best[:, :count])

    def clone(self) -> Answer:
        """The same in memory of its own."""
        return Answer(self.logits.clone(), None if self.best is None else self.best.clone())

    def enter(self, logits: torch.Tensor) -> None:
        """Overwrite all of it, by logits of any floating type."""
        self.logits.copy_(logits)
        if self.best is not None:
            self.best.copy_(best(self.logits))


def place_for(most: int, vocabulary: int, device: torch.device) -> Answer:
    """Where captured steps answer for at most so many sequences: one runs at a time, and its answer is read
    before the next.
    """
    with torch.inference_mode(False):
        logits = torch.empty(most, vocabulary, dtype=torch.float32, device=device)
        return Answer(logits, torch.empty(2, most, dtype=torch.long, device=device))
