"""The token ids of sequences on the device, for processors that read ids which the host does not know yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kv.upload import upload
from ...scheduling import SequenceGroup, TokenSequence
from ..job import Job

FIRST_ROWS = 8
FIRST_TOKENS = 64
"""Room that there is at first; later twice as much each time."""
Owner = tuple[Job, TokenSequence]


class Places:
    """The line of a tensor that belongs to each sequence, by group and number: its object may be replaced."""

    def __init__(self) -> None:
        self._places: dict[SequenceGroup, dict[int, int]] = {}
        self._free: list[int] = []

    def place(self, row: TokenSequence) -> int:
        """The line of a sequence that has one."""
        return self._places[row.group][row.index]

    def without(self, owners: Sequence[Owner]) -> list[Owner]:
        """Those whose sequences have no line yet."""
        return [
            owner for owner in owners if owner[1].index not in self._places.setdefault(owner[1].group, {})
        ]

    def take(self, row: TokenSequence) -> int:
        """Assign a free line to a sequence."""
        place = self._places[row.group][row.index] = self._free.pop()
        return place

    def drop(self, group: SequenceGroup) -> None:
        """Free the lines of a request that has ended."""
        self._free += self._places.pop(group, {}).values()

    def clear(self) -> None:
        """Drop all lines; they are made again from the tokens that the host has."""
        for group in list(self._places):
            self.drop(group)


class Histories(Places):
    """The token ids of sequences as processors see them, one line per sequence.

    A line begins with the tokens that the host has when a token is first chosen for the sequence. Later
    choices are recorded on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ids = torch.zeros(0, FIRST_TOKENS, dtype=torch.long, device="cpu")
        """[places, tokens]"""

    def enter(self, owners: Sequence[Owner], device: torch.device) -> None:
        """Make lines for sequences that have none."""
        if self._ids.device != device:
            self._places = {}
            self._free = []
            self._room(0, 0, device)
        new = self.without(owners)
        if not new:
            return
        lines = [job.params.seen(row.tokens) for job, row in new]
        self._room(len(new), max(map(len, lines)), device)
        places = [self.take(row) for _, row in new]
        longest = max(map(len, lines))
        filled = upload([line + [0] * (longest - len(line)) for line in lines], device)
        self._ids[upload(places, device), :longest] = filled

    def read(self, owners: Sequence[Owner], lengths: Sequence[int], width: int, pad: int) -> torch.Tensor:
        """The last `width` ids of sequences of these lengths: [rows, width], with `pad` before the first
        one.
        """
        lines = [self.place(row) for _, row in owners]
        places, starts = upload([lines, [length - width for length in lengths]], self._ids.device)
        columns = starts[:, None] + torch.arange(width, device=self._ids.device)
        return self._ids[places[:, None], columns.clamp(min=0)].masked_fill(columns < 0, pad)

    def note(self, owners: Sequence[Owner], lengths: Sequence[int], tokens: torch.Tensor) -> None:
        """Record the tokens [rows] chosen for sequences of these lengths."""
        self._room(0, max(lengths) + 1, self._ids.device)
        places, columns = upload([[self.place(row) for _, row in owners], list(lengths)], self._ids.device)
        self._ids[places, columns] = tokens

    def _room(self, rows: int, tokens: int, device: torch.device) -> None:
        """Make room for this many more sequences and this many tokens in each."""
        before, length = self._ids.shape
        if self._ids.device != device:
            before = 0
        elif len(self._free) >= rows and length >= tokens:
            return
        after = before if len(self._free) >= rows else max(2 * before, before + rows, FIRST_ROWS)
        longer = length if length >= tokens else max(2 * length, tokens)
        with torch.inference_mode(False):  # the next driver may be in another mode
            grown = torch.zeros(after, longer, dtype=torch.long, device=device)
            grown[:before, :length] = self._ids[:before]
        self._ids = grown
        self._free += range(before, after)
