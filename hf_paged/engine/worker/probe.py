"""Findings of a trial of a model: how far logits are apart, and why a model cannot be served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from ...kv import NoKernels, is_out_of_memory
from ...model.invariant.known import NotInvariant
from ...model.servable import Unservable

CLOSE = {torch.float32: 1e-2, torch.float64: 1e-6}
CLOSE_IN_HALF = 5e-2
"""How far logits may be apart that should be the same, as a share of their size. A token that sees what it
should not is far beyond.
"""
CLOSE_TO_ROWS = {torch.float32: 1e-4, torch.float64: 1e-8}
"""How far logits behind recurrent states may be from those of the rows one by one, or so many times what
these are off: a state that is lost changes a model without training by no more than a thousandth.
"""
TIMES_ROWS = 4.0
ROUNDINGS = 2.0
MOST_IN_HALF = 0.25
"""In half precision a deep model may be further off: by so many times what rounding its embeddings once more
does, and at most so far.
"""


@contextmanager
def tried(what: str) -> Iterator[None]:
    """Errors of a trial as a reason why the model cannot be served. Want of memory or of kernels is no fault
    of the model.
    """
    try:
        yield
    except (NoKernels, Unservable):
        raise
    except NotInvariant as error:
        raise Unservable(str(error)) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Unservable(f"{what} ({type(error).__name__}: {error})") from error


def require_numbers(model: nn.Module, logits: torch.Tensor) -> None:
    """Raise if a model answers plain tokens with logits that are no finite numbers."""
    if bool(logits.isfinite().all()):
        return
    found = "NaN" if bool(logits.isnan().any()) else "infinite logits"
    tensors = chain(model.named_parameters(), model.named_buffers())
    broken = next((name for name, tensor in tensors if not _is_finite(tensor)), None)
    why = (
        "its computation overflows; try float32 or bfloat16"
        if broken is None
        else f"{broken} is not finite; load other weights"
    )
    raise Unservable(f"{type(model).__name__} answers with {found} to plain tokens, without any cache: {why}")


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    return bool(tensor.detach().to(torch.float32).isfinite().all())


def otherwise(model: nn.Module, far: float, again: float | None) -> Unservable:
    """The refusal of a model whose logits are `far` off in pieces; `again` is how far they are off where
    nothing is different.
    """
    name = type(model).__name__
    if again is not None:
        return Unservable(
            f"{name} answers the same tokens differently each time (by {again:.1e} of its "
            "logits): something in it is random or keeps a state, perhaps a hook; remove it"
        )
    return Unservable(
        f"{name} gives other logits when its prompt is computed in chunks (by {far:.1e} of its logits); use "
        "generate()"
    )


def distance(right: torch.Tensor, found: torch.Tensor) -> float:
    """How far logits are from the right ones, as a share of their size."""
    return float((right - found).norm() / right.norm().clamp(min=1e-12))


def far(
    right: torch.Tensor, found: torch.Tensor, dtype: torch.dtype, moved: Callable[[], float]
) -> float | None:
    """How far logits in `dtype` are from the right ones, if that is more than rounding; `moved` finds out
    what rounding does to them.
    """
    off = distance(right, found)
    if off <= CLOSE.get(dtype, CLOSE_IN_HALF):
        return None
    rounding = dtype not in CLOSE and off <= MOST_IN_HALF and off <= ROUNDINGS * moved()
    return None if rounding else off


def far_from_rows(
    right: torch.Tensor, pieces: torch.Tensor, found: torch.Tensor, dtype: torch.dtype
) -> float | None:
    """How far logits over recurrent states are from those of the rows one by one, if that is more than
    rounding. right: those of the model without a cache.
    """
    off = distance(pieces, found)
    if dtype not in CLOSE_TO_ROWS or off <= max(CLOSE_TO_ROWS[dtype], TIMES_ROWS * distance(right, pieces)):
        return None
    return off
