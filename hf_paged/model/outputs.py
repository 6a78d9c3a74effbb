"""Which dimension of each field of an answer carries the rows: learned from two answers of the model."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

IN_CONFIGS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Settings that request more than logits from every forward of a model."""
CLOSE = 5e-2
"""How far a field of equal rows may differ between few rows and many, as a share of its largest number."""
ROWS_FIRST = "rows first"
"""The layout of what every forward answers: logits, and what an encoder made."""
UNKNOWN = "unknown"


class Unlike(RuntimeError):
    """An answer whose fields do not have the rows where they are expected."""


_layouts: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def layouts_of(model: nn.Module) -> dict[Hashable, Any]:
    """The known layouts of the model's answers, by what its forward is asked to return.

    A layout has the shape of an answer, with the dimension of the rows in the place of each tensor, None for
    a tensor without rows. It is None where equal rows cannot be repeated.
    """
    return _layouts.setdefault(model, {None: ROWS_FIRST})


def asked_fields(model: nn.Module, arguments: Mapping[str, Any]) -> Hashable | None:
    """The outputs asked of a forward beside logits, with all that decides its fields; None without."""
    asked = {name for name, value in arguments.items() if name.startswith("output_") and value}
    asked |= {name for name in IN_CONFIGS if getattr(model.config, name, False)}
    given = frozenset(name for name, value in arguments.items() if value is not None)
    return (frozenset(asked), given) if asked else None


def layout_of(few: Any, many: Any, rows: int, index: torch.Tensor) -> Any:
    """Where two answers have their rows. Raises `Unlike` unless one is rows of the other, by `index`."""
    if isinstance(many, Cache) or many is None:
        return None
    if isinstance(few, torch.Tensor) and isinstance(many, torch.Tensor):
        return _dimension(few, many, rows, index)
    if isinstance(few, ModelOutput) and isinstance(many, ModelOutput):
        names = [name for name, part in many.items() if not isinstance(part, Cache)]
        if any(name not in few for name in names):
            raise Unlike
        return {name: layout_of(few[name], many[name], rows, index) for name in names}
    if isinstance(few, (tuple, list)) and isinstance(many, (tuple, list)) and len(few) == len(many):
        return [layout_of(one, other, rows, index) for one, other in zip(few, many, strict=True)]
    raise Unlike


def known_layout(few: Any, many: Any, rows: int, index: torch.Tensor) -> Any:
    """The same, None for answers that are not alike."""
    try:
        return layout_of(few, many, rows, index)
    except Unlike:
        return None


def _dimension(few: torch.Tensor, many: torch.Tensor, rows: int, index: torch.Tensor) -> int | None:
    """The one dimension in which `many` has the rows of `index`; None if both have the same shape."""
    if few.shape == many.shape:
        return None
    found = [i for i, (one, other) in enumerate(zip(few.shape, many.shape, strict=False)) if one != other]
    if few.ndim != many.ndim or len(found) != 1 or few.shape[found[0]] % rows:
        raise Unlike
    expected = repeated(few, found[0], rows, index)
    if expected.shape != many.shape or not _close(expected, many):
        raise Unlike
    return found[0]


def _close(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if not found.is_floating_point():
        return bool(torch.equal(expected, found))
    finite = expected.isfinite() & found.isfinite()
    one = expected.where(finite, 0).float()
    other = found.where(finite, 0).float()
    return not one.numel() or bool((one - other).abs().max() <= CLOSE * one.abs().max().clamp(min=1e-6))


def repeated(x: torch.Tensor, dimension: int, rows: int, index: torch.Tensor) -> torch.Tensor:
    """x with the rows `index` of its `rows` rows along a dimension, which may hold [rows, tokens] in one."""
    if x.shape[dimension] % rows:
        raise Unlike
    per_row: torch.Tensor = x.unflatten(dimension, (rows, -1))
    return per_row.index_select(dimension, index.to(x.device)).flatten(dimension, dimension + 1)


def repeat_fields(answer: Any, layout: Any, rows: int, index: torch.Tensor) -> Any:
    """An answer over `rows` rows as one over the rows `index` of them; raises `Unlike` for another layout."""
    if isinstance(answer, torch.Tensor):
        return _repeat(answer, layout, rows, index)
    if isinstance(answer, ModelOutput):
        parts = {name: repeat_fields(part, _part(layout, name), rows, index) for name, part in answer.items()}
        return type(answer)(**parts)
    if isinstance(answer, (tuple, list)):
        if isinstance(layout, list) and len(layout) != len(answer):
            raise Unlike(f"expected {len(layout)} tensors, got {len(answer)}")
        return type(answer)(
            repeat_fields(part, _part(layout, i), rows, index) for i, part in enumerate(answer)
        )
    return answer


def _part(layout: Any, name: str | int) -> Any:
    """The layout of a part of an answer. Caches have none."""
    if isinstance(layout, dict):
        return layout.get(name, UNKNOWN)
    return layout[name] if isinstance(layout, list) and isinstance(name, int) else layout


def _repeat(x: torch.Tensor, layout: Any, rows: int, index: torch.Tensor) -> torch.Tensor:
    if layout == ROWS_FIRST:
        return x if x.ndim == 0 or x.shape[0] % rows else repeated(x, 0, rows, index)
    if layout is None or isinstance(layout, int):
        return x if layout is None else repeated(x, layout, rows, index)
    raise Unlike(
        f"a model answered a tensor {list(x.shape)} that it did not answer when its outputs were examined; "
        "please report it"
    )
