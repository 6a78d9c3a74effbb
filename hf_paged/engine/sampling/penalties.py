"""Repetition penalties of all rows of a step at once; the tokens of each sequence are kept on the device as
flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import NamedTuple

import torch

from ...kv.upload import upload
from ...scheduling import SequenceGroup, TokenSequence
from ..job import Job
from .histories import Histories, Places
from .warp import penalised

FIRST = 8
"""Places for sequences that are made room for at first; later twice as many each time."""


class PenalizedRows(NamedTuple):
    """Rows of a step with a repetition penalty."""

    rows: torch.Tensor
    """[fined]: the indices of these rows in the step."""
    places: torch.Tensor
    """[fined]: the line of flags of each row's sequence."""
    scores: torch.Tensor
    """[fined, vocabulary], with the penalties applied."""


class PenaltyState(Places):
    """The tokens of each penalised sequence, as a line [vocabulary] of flags.

    A line is made of the tokens that the host has when the sequence's next one is chosen for the first time.
    Later choices are recorded on the device, before the host has them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.histories = Histories()
        """The ids themselves, for processors that need their order."""
        self._seen = torch.zeros(0, 0, dtype=torch.bool, device="cpu")
        """[places, vocabulary]"""

    def fined(
        self, scores: torch.Tensor, rows: Sequence[int], whose: Iterable[tuple[Job, TokenSequence]]
    ) -> PenalizedRows:
        """Scores [all rows, vocabulary] of these rows under the penalty of each row's job."""
        owners = list(whose)
        self._fit(scores)
        self._enter(self.without(owners), scores.shape[1])
        at, places = upload([list(rows), [self.place(row) for _, row in owners]], scores.device)
        penalties = [1.0 if job.params.warp is None else job.params.warp.repetition for job, _ in owners]
        return PenalizedRows(at, places, penalised(scores[at], self._seen[places], penalties))

    def note(self, fined: PenalizedRows, tokens: torch.Tensor) -> None:
        """Record the tokens of penalised rows, among those of all rows."""
        self._seen[fined.places, tokens[fined.rows]] = True

    def drop(self, group: SequenceGroup) -> None:
        super().drop(group)
        self.histories.drop(group)

    def clear(self) -> None:
        super().clear()
        self.histories.clear()

    def _fit(self, scores: torch.Tensor) -> None:
        """Move the lines to the scores' device and give them the scores' width."""
        if self._seen.device != scores.device or self._seen.shape[1] != scores.shape[1]:
            self._places = {}
            self._free = []
            with torch.inference_mode(False):  # the next driver may be in another mode
                self._seen = torch.zeros(0, scores.shape[1], dtype=torch.bool, device=scores.device)

    def _enter(self, owners: Sequence[tuple[Job, TokenSequence]], vocabulary: int) -> None:
        """Make lines from the tokens that the host has."""
        if not owners:
            return
        while len(self._free) < len(owners):
            before = len(self._seen)
            with torch.inference_mode(False):
                self._seen = torch.cat([self._seen, self._seen.new_zeros(max(before, FIRST), vocabulary)])
            self._free += range(before, len(self._seen))
        lines: list[tuple[int, list[int]]] = []
        for job, row in owners:
            place = self.take(row)
            # Ids beyond the scores cannot be repeated.
            lines.append(
                (place, [token for token in set(job.params.seen(row.tokens)) if 0 <= token < vocabulary])
            )
        places = list(chain.from_iterable(repeat(place, len(tokens)) for place, tokens in lines))
        tokens = list(chain.from_iterable(tokens for _, tokens in lines))
        self._seen[upload([place for place, _ in lines], self._seen.device)] = False
        whose, which = upload([places, tokens], self._seen.device)
        self._seen[whose, which] = True
