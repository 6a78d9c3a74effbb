"""Recurrent states, and whatever else a cache keeps outside its pages: tried for whether they follow their
rows when those are forked.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn

from ..model.slots import STATE, Slot, beside
from ..model.state_slots import rows_at
from .cache import PagedCache, has_tensors, leaves_of

logger = logging.getLogger("hf_paged")

PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.Size, type(None))
"""Values that are the same for every row."""


_verdicts: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()
"""Of each model that was tried why its rows cannot be forked after a prompt; None if they can."""


def computes_rows_apart(model: nn.Module, cache: PagedCache) -> bool:
    """Test whether equal rows must be computed one by one: the state of one cannot become that of several."""
    if cache.complete and cache.states is None and getattr(model, "_is_stateful", False):
        _conclude(model, "it keeps a state outside its cache")
    if _verdicts.get(model) is not None:
        return True
    # Stock's reset() keeps the shape of a state: it goes on with the rows it had.
    return not cache.sequences.columns and any(has_tensors(kept) for _, kept in cache.outside())


def begin_run(parts: list[PagedCache], rows: int, new: int) -> None:
    """Have the rows of a forward name the slots of their states; raises if it has run and may not again."""
    for part in parts:
        if part.states is not None:
            part.states.begin(rows_at(part.sequences.columns, rows, new))


def begin_again(parts: list[PagedCache]) -> None:
    """Have a forward that is repeated name the slots of the rows that it had: its arguments may be gone."""
    for part in parts:
        if part.states is not None:
            part.states.begin(part.states.rows)


def follow_rows(model: nn.Module, parts: list[PagedCache], rows: int) -> bool:
    """Test whether the states after a forward of `rows` rows can be forked with them. The first prompt of a
    model tries it on copies, and the verdict is kept.
    """
    states = [part.states for part in parts if part.states is not None]
    if states and getattr(model, "_is_stateful", False) and all(each.is_unused for each in states):
        _conclude(model, "it keeps a state outside its cache")
    if model not in _verdicts:
        _conclude(model, next(filter(None, (_why_rigid(part, rows) for part in parts)), None))
    return _verdicts[model] is None


def _conclude(model: nn.Module, reason: str | None) -> None:
    """Note the verdict on a model; the log names one whose equal rows are computed apart, once."""
    if model in _verdicts:
        return
    _verdicts[model] = reason
    if reason is not None:
        logger.warning(
            "%s computes equal rows of a prompt one by one: %s, which is not forked with the rows",
            type(model).__name__,
            reason,
        )


def _why_rigid(cache: PagedCache, rows: int) -> str | None:
    """The reason why content outside the pages does not follow `rows` forked rows; None if it does."""
    states = []
    for owner, kept in cache.outside():
        if owner is cache:
            if has_tensors(kept) or any(
                map(callable, kept.values())
            ):  # a method counts states of the model's
                return f"its cache is given {', '.join(sorted(kept))}"
            continue
        if isinstance(owner, STATE):
            states.append(has_tensors(kept))
        if not _forks(cache, owner, rows):
            return f"a {type(owner).__name__} keeps {', '.join(sorted(kept))}"
    return "it keeps a state outside its cache" if states and not any(states) else None


def _forks(cache: PagedCache, layer: Any, rows: int) -> bool:
    """Double the first row of a copy of the layer: true if all that it keeps has one row more then."""
    sequences = cache.sequences
    twin = Slot.like(layer, {}).open(getattr(layer, "number", 0), sequences)
    if hasattr(twin, "continue_from"):
        twin.continue_from(layer)
    with sequences.changing_all():
        twin.reorder_cache(torch.tensor([0, *range(rows)], device="cpu"))
    before, after = _tensors(beside(layer)), _tensors(beside(twin))
    if before is None or after is None or len(before) != len(after):
        return False
    return all(_has_grown(one, other, rows) for one, other in zip(before, after, strict=True))


def _has_grown(before: torch.Tensor, after: torch.Tensor, rows: int) -> bool:
    """True if one dimension has grown from `rows` by one; a tensor without rows has none of that length."""
    if before.shape == after.shape:
        return rows not in before.shape
    grown = [sizes for sizes in zip(before.shape, after.shape, strict=False) if sizes[0] != sizes[1]]
    return before.ndim == after.ndim and grown == [(rows, rows + 1)]


def _tensors(kept: Any) -> list[torch.Tensor] | None:
    """The tensors among what a layer keeps; None if it keeps objects that cannot be looked into."""
    found: list[torch.Tensor] = []
    for leaf in leaves_of(kept):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif not isinstance(leaf, PLAIN):
            return None
    return found
