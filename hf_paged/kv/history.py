"""The tokens of a cache's rows: noted step by step without looking, read once at the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


class TokenHistory:
    """Everything that happened to the rows of a cache, in order: tokens fed, rows that changed places,
    columns cropped.

    A step costs a reference to its tokens, on whatever device they are; nothing waits for a device before
    `read`.
    """

    def __init__(self) -> None:
        self._events: list[torch.Tensor | list[int] | int] = []
        self.columns = 0
        """The columns noted; a cache with another number of columns was used without noting them."""

    def feed(self, tokens: torch.Tensor) -> None:
        """Every row got its tokens of [rows, new]."""
        self._events.append(tokens)
        self.columns += tokens.shape[1]

    def select(self, sources: Sequence[int]) -> None:
        """Row i is now what row sources[i] was."""
        if self._events:
            self._events.append(list(sources))

    def crop(self, columns: int) -> None:
        """The last `columns` columns were taken back."""
        if columns:
            self._events.append(columns)
            self.columns -= columns

    def clear(self) -> None:
        """The rows are empty."""
        self._events.clear()
        self.columns = 0

    def fork(self) -> TokenHistory:
        """A copy of this history, for a cache that continues separately."""
        twin = TokenHistory()
        twin._events = list(self._events)
        twin.columns = self.columns
        return twin

    def origins(self) -> list[int]:
        """For each row as it is now the row that it was in the beginning."""
        rows = self._rows_now()
        for event in reversed(self._events):
            if isinstance(event, list):
                rows = [event[row] for row in rows]
        return rows

    def read(self) -> list[list[int]]:
        """The tokens [rows][columns] of every row as it is now, padding included; all come from the device at
        once.
        """
        fed = [event for event in self._events if isinstance(event, torch.Tensor)]
        if not fed:
            return []
        flat = torch.cat([tokens.reshape(-1) for tokens in fed]).cpu()
        ends = list(accumulate(tokens.numel() for tokens in fed))
        rows = self._rows_now()
        taken_back = 0
        parts = []
        for event in reversed(self._events):
            if isinstance(event, int):
                taken_back += event
            elif isinstance(event, list):
                rows = [event[row] for row in rows]
            else:
                tokens = flat[ends.pop() - event.numel() :][: event.numel()].view(event.shape)
                kept = max(0, event.shape[1] - taken_back)
                taken_back -= event.shape[1] - kept
                parts.append(tokens[rows, :kept])
        read: list[list[int]] = torch.cat(parts[::-1], 1).tolist()
        return read

    def _rows_now(self) -> list[int]:
        last = next((event for event in reversed(self._events) if not isinstance(event, int)), ())
        return list(range(len(last)))
