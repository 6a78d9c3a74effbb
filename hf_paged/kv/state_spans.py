"""Sequences that lie in one row of tokens, as convolutions and recurrences go through them: each a span
behind the state in the slot that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from .state_steps import read, write
from .upload import upload

Convolution = Callable[[torch.Tensor], torch.Tensor]
"""Convolves x [1, C, length] causally: the answer has the same shape, and nothing is before the first."""


class SpanRows(NamedTuple):
    """Spans that are computed beside each other, as rows [rows, length]; a shorter one ends with its last
    token again.
    """

    begin: int
    """Where the first of them begins in the row of tokens."""
    rows: int
    length: int
    source: torch.Tensor
    """The slots [rows] that they read, -1 for no past."""
    target: torch.Tensor
    """The slots [rows] that they write, -1 for none."""
    has_past: bool
    """True if any of them reads a slot."""
    taken: torch.Tensor | None
    """The places [rows * length] of their tokens in the row; None of one span alone."""
    beyond: torch.Tensor | None
    """[rows, length]: true behind the end of a span; None if all are of this length."""
    kept: torch.Tensor | None
    """The tokens [tokens] of rows * length that are of spans; None if all are."""
    places: torch.Tensor | None
    """The places [tokens] of these in the row; None of one span alone."""

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows [rows, length, ...] of x [1, tokens, ...]."""
        if self.taken is None:
            return x[:, self.begin : self.begin + self.length]
        return x[0].index_select(0, self.taken).view(self.rows, self.length, *x.shape[2:])

    def ended(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, length, ...], and zeros behind the end of spans."""
        if self.beyond is None:
            return x
        return x.masked_fill(self.beyond.view(*self.beyond.shape, *[1] * (x.ndim - 2)), 0)

    def put(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Put x [rows, length, ...] where the spans are in out [tokens, ...]."""
        if self.places is None:
            out[self.begin : self.begin + self.length] = x[0]
            return
        flat = x.flatten(0, 1)
        out.index_copy_(0, self.places, flat if self.kept is None else flat.index_select(0, self.kept))


class Spans(NamedTuple):
    """Spans as a kernel takes them: the tokens from begins[i] to ends[i], at most `longest`, behind the state
    in a slot.
    """

    begins: torch.Tensor
    ends: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    longest: int


class StateSpans:
    """The spans of a step, of counts[i] tokens each, one behind the other: span i reads the slot read[i] and
    writes the slot written[i].
    """

    def __init__(self, counts: Sequence[int], read: Sequence[int], written: Sequence[int]) -> None:
        self.counts = list(counts)
        self.borders = [0, *accumulate(counts)]
        self._read = list(read)
        self._written = list(written)
        self._slots: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._windows: dict[tuple[int, torch.device], tuple[torch.Tensor, ...]] = {}
        self._rows: dict[tuple[int, int, torch.device], list[SpanRows]] = {}
        self._several: dict[torch.device, Spans] = {}

    @property
    def tokens(self) -> int:
        return self.borders[-1]

    def slots(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots [spans] that are read, and those that are written."""
        if device not in self._slots:
            self._slots[device] = upload(self._read, device), upload(self._written, device)
        return self._slots[device]

    # ---- convolutions

    def convolve(self, convolution: Convolution, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The tokens x [1, C, tokens] of all spans, each convolved behind its last inputs: states [slots, C,
        taps] of one layer, which are replaced.
        """
        taps = states.shape[-1]
        source, target = self.slots(x.device)
        order, own, ends = self._windows_of(taps, x.device)
        past = read(states, source).transpose(0, 1).flatten(1)
        row = torch.cat([x[0], past], 1)[:, order]
        answer = convolution(row[None])[..., own]
        write(states, target, row[:, ends].transpose(0, 1))
        return answer

    def _windows_of(self, taps: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The order in which tokens and the states behind them make one row where each span is behind its
        state, the places of the tokens in it, and those [spans, taps] of the last inputs of each span.
        """
        key = taps, device
        if key not in self._windows:
            order: list[int] = []
            own: list[int] = []
            ends: list[list[int]] = []
            for i, (begin, end) in enumerate(self._each()):
                state = self.tokens + i * taps
                order += range(state, state + taps)
                own += range(len(order), len(order) + end - begin)
                order += range(begin, end)
                ends.append([*range(len(order) - taps, len(order))])
            self._windows[key] = upload(order, device), upload(own, device), upload(ends, device)
        return self._windows[key]

    def _each(self) -> Iterable[tuple[int, int]]:
        return zip(self.borders[:-1], self.borders[1:], strict=True)

    # ---- recurrences

    def rows(self, chunk: int, least: int, device: torch.device) -> list[SpanRows]:
        """The spans as rows that are computed beside each other, for a function that goes by chunks of so
        many tokens. Single tokens behind others come first, in rows of their own; a span of fewer tokens than
        a chunk is in rows of a power of two of at least `least`.
        """
        key = chunk, least, device
        if key not in self._rows:
            together: dict[int, list[int]] = {}
            for i, count in enumerate(self.counts):
                single = count == 1 and self._read[i] >= 0
                together.setdefault(1 if single else rounded(count, chunk, least), []).append(i)
            self._rows[key] = [
                self._beside(length, spans, device) for length, spans in sorted(together.items())
            ]
        return self._rows[key]

    def several(self, device: torch.device) -> Spans:
        """The spans that are more than a token behind others."""
        if device not in self._several:
            spans = [i for i, count in enumerate(self.counts) if count > 1 or self._read[i] < 0]
            begins, ends, read, written = (
                [each[i] for i in spans]
                for each in (self.borders[:-1], self.borders[1:], self._read, self._written)
            )
            longest = max([self.counts[i] for i in spans], default=0)
            slots = upload(read, device), upload(written, device)
            self._several[device] = Spans(upload(begins, device), upload(ends, device), *slots, longest)
        return self._several[device]

    def _beside(self, length: int, spans: list[int], device: torch.device) -> SpanRows:
        read, written = ([slots[i] for i in spans] for slots in (self._read, self._written))
        slots = upload(read, device), upload(written, device)
        begin = self.borders[spans[0]]
        has_past = max(read) >= 0
        if len(spans) == 1:
            return SpanRows(begin, 1, self.counts[spans[0]], *slots, has_past, None, None, None, None)
        taken: list[int] = []
        kept: list[int] = []
        places: list[int] = []
        for row, i in enumerate(spans):
            begins, count = self.borders[i], self.counts[i]
            taken += [*range(begins, begins + count), *[begins + count - 1] * (length - count)]
            kept += range(row * length, row * length + count)
            places += range(begins, begins + count)
        whole = len(kept) == len(taken)
        beyond = None
        if not whole:
            counts = upload([self.counts[i] for i in spans], device)
            beyond = torch.arange(length, device=device)[None] >= counts[:, None]
        return SpanRows(
            begin, len(spans), length, *slots, has_past, upload(taken, device), beyond,
            None if whole else upload(kept, device), upload(places, device),
        )  # fmt: skip


def rounded(count: int, chunk: int, least: int) -> int:
    """The length of the rows in which a span of `count` tokens is computed: chunks and at most a quarter of
    them more, or where the span is shorter than one, a power of two.
    """
    if count <= chunk:
        return min(chunk, max(least, 1 << (count - 1).bit_length()))
    chunks = -(-count // chunk)
    unit = 1 << max(0, chunks.bit_length() - 3)
    return -(-chunks // unit) * unit * chunk
