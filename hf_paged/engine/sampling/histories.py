"""The token ids of sequences on the device, for processors that read ids which the host does not know yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kv.ordinary import ordinary_tensors
from ...kv.upload import upload
from ...scheduling import SequenceGroup, TokenSequence
from .params import SamplingParams

FIRST_ROWS = 8
FIRST_TOKENS = 64
"""Room that there is at first; later twice as much each time."""
Owner = tuple[SamplingParams, TokenSequence]


class Histories:
    """The token ids of sequences as processors see them, one line [tokens] per sequence on the device.

    A line begins with the tokens that the host has when a token is first chosen for the sequence. Later
    choices are recorded on the device. Lines belong to a group and a number: a sequence may be replaced.
    """

    def __init__(self) -> None:
        self._ids = torch.zeros(0, FIRST_TOKENS, dtype=torch.long, device="cpu")
        """[lines, tokens]"""
        self._lines: dict[SequenceGroup, dict[int, int]] = {}
        self._free: list[int] = []

    def drop(self, group: SequenceGroup) -> None:
        """Free the lines of a request that has ended."""
        self._free += self._lines.pop(group, {}).values()

    def clear(self) -> None:
        """Drop all lines; they are made again from the tokens that the host has."""
        for group in list(self._lines):
            self.drop(group)

    def enter(self, owners: Sequence[Owner], device: torch.device) -> None:
        """Make lines for sequences that have none."""
        if self._ids.device != device:
            self._lines = {}
            self._free = []
            self._room(0, 0, device)
        new = [each for each in owners if each[1].index not in self._lines.setdefault(each[1].group, {})]
        if not new:
            return
        seen = [params.seen(row.tokens) for params, row in new]
        longest = max(map(len, seen))
        self._room(len(new), longest, device)
        for _, row in new:
            self._lines[row.group][row.index] = self._free.pop()
        filled = upload([ids + [0] * (longest - len(ids)) for ids in seen], device)
        self._ids[upload(self._lines_of(new), device), :longest] = filled

    def read(self, owners: Sequence[Owner], lengths: Sequence[int], width: int, pad: int) -> torch.Tensor:
        """The last `width` ids of sequences of these lengths: [rows, width], with `pad` before the first
        one.
        """
        starts = [length - width for length in lengths]
        lines, firsts = upload([self._lines_of(owners), starts], self._ids.device)
        columns = firsts[:, None] + torch.arange(width, device=self._ids.device)
        return self._ids[lines[:, None], columns.clamp(min=0)].masked_fill(columns < 0, pad)

    def whole(self, owners: Sequence[Owner], lengths: Sequence[int], pad: int) -> torch.Tensor:
        """All ids of sequences of these lengths: [rows, longest], with `pad` behind the last one."""
        lines, ends = upload([self._lines_of(owners), list(lengths)], self._ids.device)
        width = max(lengths)
        ids = self._ids[:, :width].index_select(0, lines)
        return ids.masked_fill_(torch.arange(width, device=ids.device) >= ends[:, None], pad)

    def spans(
        self, owners: Sequence[Owner], begins: Sequence[int], ends: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of sequences from `begins` to `ends`, and which of them are some: two [rows, longest]. The
        others are 0.
        """
        device = self._ids.device
        lines, firsts, behind = upload([self._lines_of(owners), list(begins), list(ends)], device)
        width = max([end - begin for begin, end in zip(begins, ends, strict=True)])
        columns = firsts[:, None] + torch.arange(width, device=device)
        there = columns < behind[:, None]
        ids = self._ids[lines[:, None], columns.clamp_(max=self._ids.shape[1] - 1)]
        return ids.mul_(there), there

    def note(self, owners: Sequence[Owner], lengths: Sequence[int], tokens: torch.Tensor) -> None:
        """Record the tokens [rows] chosen for sequences of these lengths."""
        self._room(0, max(lengths) + 1, self._ids.device)
        lines, columns = upload([self._lines_of(owners), list(lengths)], self._ids.device)
        self._ids[lines, columns] = tokens

    def _lines_of(self, owners: Sequence[Owner]) -> list[int]:
        return [self._lines[row.group][row.index] for _, row in owners]

    def _room(self, rows: int, tokens: int, device: torch.device) -> None:
        """Make room for this many more sequences and this many tokens in each."""
        before, length = self._ids.shape
        if self._ids.device != device:
            before = 0
        elif len(self._free) >= rows and length >= tokens:
            return
        after = before if len(self._free) >= rows else max(2 * before, before + rows, FIRST_ROWS)
        longer = length if length >= tokens else max(2 * length, tokens)
        with ordinary_tensors():  # the next driver may be in another mode
            grown = torch.zeros(after, longer, dtype=torch.long, device=device)
            grown[:before, :length] = self._ids[:before]
        self._ids = grown
        self._free += range(before, after)
