"""The rows of a call that its forwards compute: those of a prompt that differ, those of a step that run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteriaList

from ..kv.static import download
from ..kv.upload import upload
from ..model.capture.step import bucket_of

Hooked = tuple[dict[str, Any], str]
"""The keywords of a hook with which peft hands a layer what is of its rows, and the name of one."""


class ComputedRows(NamedTuple):
    """The rows of a call that a forward computes, fewer than the call has."""

    rows: list[int]
    """Their places in the call, in order."""
    sources: list[int]
    """Of every row of the call which of `rows` answers for it."""
    uploaded: dict[torch.device, tuple[torch.Tensor, torch.Tensor]]
    """Both on devices that have asked for them."""
    selected: dict[str, tuple[Any, Any]]
    """By name the last argument of several tensors, and these rows of it: an encoder's answer is the same in
    every step.
    """

    @classmethod
    def of(cls, representatives: Sequence[int]) -> ComputedRows | None:
        """From the row that answers for each row; None if each does for itself."""
        rows = sorted(set(representatives))
        if len(rows) == len(representatives):
            return None
        place = {row: i for i, row in enumerate(rows)}
        return cls(rows, [place[row] for row in representatives], {}, {})

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows` and `sources` on a device."""
        if device not in self.uploaded:
            self.uploaded[device] = upload(self.rows, device), upload(self.sources, device)
        return self.uploaded[device]


class EndedRows(StoppingCriteriaList):
    """The stopping criteria of a call, which note the rows that end.

    Stock's loop waits for the device right behind its criteria, to learn if a row still runs. The answer of
    the criteria is on the host by then.
    """

    def __init__(self, criteria: Iterable[Any], rows: int) -> None:
        super().__init__(criteria)
        self.computed: ComputedRows | None = None
        """The rows that steps compute; None for all."""
        self.hooked: list[Hooked] = []
        """The hooks that hand adapters to the rows, found among all modules when rows leave."""
        self.padded = False
        """True if rows were padded when some left: steps stay those of padded rows, with no new capture."""
        self._ended = [False] * rows
        self._latest: Callable[[], Sequence[torch.Tensor]] | None = None
        """The last answer of the criteria, on its way to the host."""
        self.begun = False
        """True once the criteria were asked: the prompt is over."""

    def __call__(
        self, input_ids: torch.LongTensor, scores: tuple[torch.Tensor] | None, **kwargs: Any
    ) -> torch.BoolTensor:
        done: torch.BoolTensor = super().__call__(input_ids, scores, **kwargs)
        self._read()
        self._latest = download([done])
        self.begun = True
        return done

    def rows_of_step(self) -> ComputedRows | None:
        """The rows that the next step computes; None for all.

        Ended rows leave when those that run fit the next smaller size of captured steps. So rows move a few
        times while their number halves, and not whenever one ends.
        """
        if self._read():
            running = [row for row, ended in enumerate(self._ended) if not ended]
            held = len(self._ended) if self.computed is None else len(self.computed.rows)
            if running and bucket_of(len(running)) < bucket_of(held):
                own = [running[0] if ended else row for row, ended in enumerate(self._ended)]
                self.computed = ComputedRows.of(own)
        return self.computed

    def _read(self) -> bool:
        """Take in the last answer of the criteria; true if a row has ended with it."""
        if self._latest is None:
            return False
        (done,) = self._latest()
        self._latest = None
        before = self._ended
        self._ended = [old or new for old, new in zip(before, done.tolist(), strict=True)]
        return self._ended != before
