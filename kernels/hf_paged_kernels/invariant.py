"""Arithmetic on a CUDA device in which the bits of a row depend on that row alone.

The kernels of this package in fixed tiles, and what a model computes between them. Products are torch's own
where they are seen to add up in the order of `product`, which every tile of tensor cores shares unless the
depth is split.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from .decode import Plan
from .norm import add_rms_norm, rms_norm
from .prefill import Spans, prefill
from .product import product
from .rows import mapped, rows
from .swiglu import swiglu

SAMPLES = 2**19
"""Numbers of an answer that are compared before torch's own product is used for a shape."""
MOST_TRIES = 128
"""Answers that are compared; those of smaller ones are of sums that show an order sooner, too."""


class NoFixedOrder(NotImplementedError):
    """Attention that these kernels have no fixed order for."""


class Invariant:
    """The package's kernels under their names, and products, attention, sums and functions on tensors."""

    def __init__(self, package: Any) -> None:
        self._package = package
        self.Plan = partial(Plan, invariant=True)
        self.Spans = partial(Spans, invariant=True)
        self.prefill = partial(prefill, invariant=True)
        self.rms_norm = partial(rms_norm, invariant=True)
        self.add_rms_norm = partial(add_rms_norm, invariant=True)
        self.swiglu = partial(swiglu, invariant=True)
        self._shown: dict[Any, bool] = {}
        """Shapes of products, and whether torch's own have the bits of ours."""
        self._views: list[_View] = []
        """How the last masks let queries see keys."""
        self._whole: dict[Any, _View] = {}
        """The same without a mask."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)

    # ---- products

    def mm(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, depth] by a layer's weight w [depth, columns], plus bias [columns]: [rows, columns]."""
        with _on(x.device):
            if x.stride(1) == 1 and self._is_shown(x, w, bias):
                return _torchs(x, w, bias)
            return product(x[None], w[None], bias)[0]

    def is_torchs_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """True if torch's linear of x [..., depth] by weight [columns, depth] is known to have our bits."""
        depth = x.shape[-1]
        if not x.is_contiguous() or not depth or weight.dtype != x.dtype:
            return False
        return self._shown.get(_key(x.numel() // depth, depth, x, weight, weight.stride()[::-1], bias), False)

    def bmm(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [batches, rows, depth] w [batches, depth, columns], one number after the other: zeros between
        them change no bit.
        """
        with _on(x.device):
            return product(x.float(), w.float()).to(x.dtype)

    def grouped(self, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Rows of x [rows, depth] by experts w [experts, depth, columns]; ends [experts]: where each one's
        rows end.
        """
        with _on(x.device):
            return product(x[None], w, ends=ends.to(torch.int32))[0]

    # ---- rows and numbers

    def rows(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        """`rows` of x [rows, width] in float32."""
        with _on(x.device):
            return rows(kind, x)

    def mapped(self, kind: str, x: torch.Tensor, parameter: float = 0.0) -> torch.Tensor:
        """`mapped` of x."""
        with _on(x.device):
            return mapped(kind, x, parameter)

    def _is_shown(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """True if torch's product of these shapes has the bits of ours, as seen on random numbers."""
        key = _key(len(x), x.stride(0), x, w, w.stride(), bias)
        known = self._shown.get(key)
        if known is None:
            if _capturing(x.device):
                return False
            known = self._shown[key] = _alike(x, w, bias)
        return known

    # ---- attention

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of query [batches, heads, tokens, key_dim] over keys and values [batches, key
        heads, columns, dim]: [batches, heads, tokens, value_dim].

        mask: [batches or 1, 1, tokens, columns], boolean or added: causal, of a window or not, over the
        tokens of each sequence; several sequences may lie in a row, and columns that no token sees anywhere.
        Each query's sums run over the tokens of its sequence, from the first on. A token that is not there
        gives 0.
        """
        batches, heads, tokens, _ = query.shape
        columns = keys.shape[2]
        with _on(query.device):
            if mask is None:
                if not causal and tokens > 1:
                    raise NoFixedOrder("attention that is not causal")
                if causal and tokens != columns and tokens > 1:
                    raise NoFixedOrder("causal attention of some tokens over more keys without a mask")
                seen = 1 if causal and tokens == 1 else columns
                view = self._unmasked(batches, tokens, seen, columns, query.device)
            else:
                view = self._view(mask, batches, tokens, columns)
            packed = query.transpose(1, 2).reshape(batches * tokens, heads, query.shape[3])
            flat = [
                each.transpose(1, 2).reshape(batches * columns, 1, *each.shape[1::2])
                for each in (keys, values)
            ]
            if view.queries is not None:
                packed = packed.index_select(0, view.queries)
            found = self.prefill(
                packed,
                *flat,
                view.table,
                view.borders,
                view.lengths,
                view.most,
                window=view.window,
                scale=scale,
            )
            if view.queries is not None:
                every = found.new_zeros(batches * tokens, *found.shape[1:])
                found = every.index_copy_(0, view.queries, found)
        return found.view(batches, tokens, heads, values.shape[3]).transpose(1, 2)

    def _view(self, mask: torch.Tensor, batches: int, tokens: int, columns: int) -> _View:
        """The view of a mask, kept while layers are given the same one."""
        if mask.is_inference():  # writes to it are not counted
            return _read(mask, batches, tokens, columns)
        key = (mask.data_ptr(), mask.shape, mask.stride(), mask._version, batches, tokens, columns)
        owner = mask._base if mask._base is not None else mask
        for view in self._views:
            if view.key == key and view.owner is not None and view.owner() is owner:
                return view
        view = _read(mask, batches, tokens, columns)._replace(key=key, owner=weakref.ref(owner))
        self._views = [view, *self._views[:3]]
        return view

    def _unmasked(self, batches: int, tokens: int, seen: int, columns: int, device: torch.device) -> _View:
        """Every row is one sequence of `columns`; all tokens ask, and see what is before them and `seen`."""
        key = (batches, tokens, seen, columns, device)
        view = self._whole.get(key)
        if view is None:
            ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
            begins = torch.arange(0, batches * columns, columns, **ints)[:, None]
            table = begins + torch.arange(columns, **ints)
            borders = torch.arange(0, (batches + 1) * tokens, tokens, **ints)
            view = _View(table, borders, torch.full((batches,), seen, **ints), tokens)
            if not _capturing(device):
                self._whole = {key: view}
        return view


def _key(
    rows: int,
    stride: int,
    x: torch.Tensor,
    w: torch.Tensor,
    strides: Sequence[int],
    bias: torch.Tensor | None,
) -> Any:
    """Facts that decide how torch computes a product of `rows` rows of x, `stride` apart, by a weight with
    these strides: w or its transpose.
    """
    return (
        rows, stride, x.shape[-1], w.numel(), tuple(strides), x.dtype, x.device, bias is None,
        x.data_ptr() % 16, w.data_ptr() % 16, torch.backends.cuda.preferred_blas_library(),
        torch.get_float32_matmul_precision(),
    )  # fmt: skip


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on `device`; in the interpreter there is none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _torchs(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)


def _alike(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """True if torch's product has the bits of ours on random numbers that lie as these do."""
    tries = -(-SAMPLES // max(1, len(x) * w.shape[1]))
    few = tries > MOST_TRIES
    if few and 0 in (*x.stride(), *w.stride()):  # numbers that lie in one place cannot cancel each other
        return False
    try:
        own = _random_like(w)
        against = _cancelling(own, -1) if few else None
        added = None if bias is None else torch.randn_like(bias)
        for _ in range(min(MOST_TRIES, tries)):
            made = _random_like(x)
            if not _equal(made, own, added):
                return False
            nothing = None if added is None else torch.zeros_like(added)
            if against is not None and not _equal(_cancelling(made.t(), 1).t(), against, nothing):
                return False
    except torch.OutOfMemoryError:
        return False
    return True


def _equal(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return torch.equal(_torchs(x, w, bias), product(x[None], w[None], bias)[0])


def _cancelling(numbers: torch.Tensor, sign: int) -> torch.Tensor:
    """A copy of numbers [depth, ...] that lies as they do, the second half of which is the first in another
    order, times `sign`. Sums of products of two such are rounding errors alone: a few of them show another
    order, which one of ten thousand ordinary sums shows in half precision.
    """
    made = _random_like(numbers).copy_(numbers)
    half = len(made) // 2
    first = made[:half]
    made[half:] = 0
    made[half : 2 * half] = sign * torch.cat([first[::2], first[1::2]])
    return made


def _random_like(x: torch.Tensor) -> torch.Tensor:
    """Numbers of the same shape, strides and alignment."""
    size = 1 + sum((count - 1) * stride for count, stride in zip(x.shape, x.stride(), strict=True))
    off = x.data_ptr() % 16 // x.element_size()
    made = torch.empty(size + off, dtype=x.dtype, device=x.device).normal_()
    return made.as_strided(x.shape, x.stride(), off)


# ---- what queries see


class _View(NamedTuple):
    """Sequences of a batch, for the kernel of prompts: each has a row of `table`."""

    table: torch.Tensor
    """Where the tokens of each sequence lie, [sequences, longest]."""
    borders: torch.Tensor
    lengths: torch.Tensor
    most: int
    window: int | None = None
    queries: torch.Tensor | None = None
    """Which tokens of the batch ask; None: all of them, sequence by sequence."""
    key: Any = None
    """Where the mask lay that it was read from, and how often that was written to."""
    owner: weakref.ref[torch.Tensor] | None = None
    """The tensor whose memory that was."""


def _read(mask: torch.Tensor, batches: int, tokens: int, columns: int) -> _View:
    """The sequences that a mask lets queries see, or NoFixedOrder if it is none of causal attention."""
    device = mask.device
    if mask.ndim == 4 and mask.stride(1) == 0:
        mask = mask[:, :1]
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise NoFixedOrder(f"a mask of {list(mask.shape)}, not [batches, 1, tokens, columns]")
    shown = mask if mask.dtype == torch.bool else mask == 0
    trouble = torch.zeros((), dtype=torch.bool, device=device)
    if mask.dtype != torch.bool:
        trouble = (~shown & (mask > torch.finfo(mask.dtype).min / 2)).any()
    shown = shown[:, 0].expand(batches, tokens, columns)
    column = torch.arange(columns, device=device)
    counts = shown.sum(-1)
    first = shown.int().argmax(-1)
    last = columns - 1 - shown.flip(-1).int().argmax(-1)
    there = shown.any(1)
    asks = counts > 0
    if tokens == columns:  # a token that no other sees is padding, whatever it sees itself
        asks &= there
        trouble |= (asks & (last != column)).any()
    else:  # the new tokens are the last ones of their rows
        before = last.masked_fill(~asks, -1)[:, :-1].cummax(1).values
        trouble |= (asks[:, 1:] & (last[:, 1:] <= before)).any()
    rank = there.cumsum(-1) - 1
    begins = there & (rank == 0)
    if tokens == columns:  # a token that sees no other begins a sequence
        begins |= asks & (counts == 1)
    start = torch.where(begins, rank, -1).cummax(1).values
    own_rank = rank.gather(1, last)
    first_rank = rank.gather(1, first)
    window = torch.where(asks, counts, 0).amax()
    wanted = torch.maximum(start.gather(1, last), own_rank - window + 1)
    trouble |= (asks & ((counts != own_rank - first_rank + 1) | (first_rank != wanted))).any()
    sequence = begins.flatten().cumsum(0) - 1  # of each column
    places = torch.where(there, rank - start, -1)  # in its sequence
    broken, count, longest, widest = torch.stack(
        [trouble.long(), begins.sum(), places.amax() + 1, window]
    ).tolist()
    if broken:
        raise NoFixedOrder("a mask that is not causal over the tokens of each sequence")
    column_of = there.flatten().nonzero()[:, 0]
    own = sequence[column_of]
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    table = torch.zeros(count, longest, **ints)
    table[own, places.flatten()[column_of]] = column_of.int()
    lengths = torch.zeros(count, **ints).index_add_(0, own, torch.ones_like(own, dtype=torch.int32))
    queries = asks.flatten().nonzero()[:, 0]
    flat = torch.arange(batches, device=device)[:, None] * columns + last
    asked = sequence[flat.flatten()[queries]]
    asking = torch.zeros(count, **ints).index_add_(0, asked, torch.ones_like(asked, dtype=torch.int32))
    borders = pad(asking.cumsum(0), (1, 0)).int()
    most = int(asking.max()) if count else 0
    every = len(queries) == batches * tokens
    window_of = widest if widest < longest else None
    return _View(table, borders, lengths, most, window_of, None if every else queries)
