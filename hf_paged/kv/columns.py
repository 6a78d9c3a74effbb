"""The columns of a captured step: static tensors, laid out from the declarations and found by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..blocks import COLUMNS, Column, Numbers
from .ordinary import ordinary_tensors
from .upload import upload


class StaticColumns:
    """A static tensor for each column that captured steps have. `load` copies what has changed since it was
    called last. Entries beyond those that are loaded are empty.
    """

    def __init__(self, columns: Iterable[Column], rows: int, tokens: int, device: torch.device) -> None:
        """rows, tokens: the entries of columns per row and per token."""
        columns = [each for each in columns if each.captured]
        sizes = {"row": rows, "token": tokens}
        with ordinary_tensors():
            self.tensors = {
                each.name: torch.full(
                    (sizes[each.per],), each.empty, dtype=getattr(torch, each.dtype), device=device
                )
                for each in columns
            }
        self.loaded: object = None
        """The numbers that were loaded last."""
        self._empty = {each.name: each.empty for each in columns}
        self._held: dict[str, tuple[object, int]] = dict.fromkeys(self.tensors, (None, 0))
        """By column what its tensor holds, and how many entries that are."""

    def load(self, numbers: Numbers) -> None:
        """Load the numbers of a step. Columns that are not among them are empty."""
        unknown = sorted(name for name in numbers.keys() - self.tensors.keys() if COLUMNS[name].captured)
        if unknown:
            raise RuntimeError(f"this step was captured before the columns {unknown} were declared")
        self.loaded = None
        for name, tensor in self.tensors.items():
            given = numbers.get(name)
            held, filled = self._held[name]
            if given is held:
                continue
            self._held[name] = self, len(tensor)  # an interrupt leaves any numbers
            count = 0 if given is None else len(given)
            if given is not None:
                tensor[:count].copy_(upload(list(given), tensor.device, tensor.dtype))
            if count < filled:
                tensor[count:].fill_(self._empty[name])
            self._held[name] = given, count
        self.loaded = numbers
