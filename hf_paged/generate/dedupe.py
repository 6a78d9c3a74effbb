"""Compute each prompt once: beams and samples of one prompt are equal rows until they differ."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils.generic import ModelOutput

from ..model.outputs import ROWS_FIRST, repeat_fields
from .cache import PagedCache

SCALARS = (bool, int, float, str, torch.dtype, type(None), Cache)


@cache
def keeps_another_cache(cls: Any) -> bool:
    """Whether the forward of a model class takes a second cache from step to step, whose rows cannot be
    repeated.
    """
    names = inspect.signature(cls.forward).parameters
    return any(
        name.endswith(("_past_key_values", "_cache")) and not name.startswith("use_") for name in names
    )


def unique_rows(arguments: Mapping[str, Any], rows: int, copies: int) -> dict[str, Any] | None:
    """The forward's arguments for every `copies`-th row; None if the rows in between are not, or may not be,
    the same.
    """
    kept = {}
    for name, value in arguments.items():
        if isinstance(value, SCALARS):
            kept[name] = value
            continue
        # Positions of three axes come as [3, rows, tokens]: three of them could be taken for rows.
        if name == "position_ids" and isinstance(value, torch.Tensor) and value.ndim != 2:
            return None
        if not _equal(value, rows, copies):
            return None
        kept[name] = _each(value, lambda x: x[::copies].contiguous())
    return kept


class Draws:
    """Whether a forward draws random numbers, as codecs of recordings do: then rows of equal inputs are not
    equal rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._states()

    def _states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else states

    def drawn(self) -> bool:
        """Whether torch's generators have moved since."""
        return not all(map(torch.equal, self._before, self._states()))

    def take_back(self) -> None:
        """Put the generators back to where they were."""
        torch.set_rng_state(self._before[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._before[1], self._device)


def _equal(value: Any, rows: int, copies: int) -> bool:
    """Whether every tensor in `value` has `rows` rows, equal in groups of `copies`."""
    if isinstance(value, torch.Tensor):
        if value.ndim == 0 or value.shape[0] != rows:
            return False
        groups = value.unflatten(0, (-1, copies))
        return bool((groups == groups[:, :1]).all())
    if isinstance(value, ModelOutput):
        return all(_equal(part, rows, copies) for part in value.values())
    if isinstance(value, (tuple, list)):
        return all(isinstance(part, torch.Tensor) and _equal(part, rows, copies) for part in value)
    return value is None


def repeat_rows(value: Any, rows: int, copies: int, layout: Any = ROWS_FIRST) -> Any:
    """The answer of a forward over `rows` rows, as if each were repeated `copies` times.

    A model may have put the cache next to one of its own, for what it sees of a picture: that has as many
    rows as were computed.
    """
    both = value.get("past_key_values") if isinstance(value, ModelOutput) else None
    if isinstance(both, EncoderDecoderCache) and not isinstance(both.cross_attention_cache, PagedCache):
        both.cross_attention_cache.batch_repeat_interleave(copies)
    return repeat_fields(value, layout, rows, copies)


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _each(part, change) for name, part in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(_each(part, change) for part in value)
    return value


@contextmanager
def adapters_of_unique_rows(model: nn.Module, rows: int, copies: int) -> Iterator[None]:
    """Let peft's mixed batches see the adapter names of the unique rows only."""
    changed: list[tuple[dict[str, Any], Any]] = []
    try:
        for keywords in _adapter_keywords(model, rows):
            changed.append((keywords, keywords["adapter_names"]))
            keywords["adapter_names"] = keywords["adapter_names"][::copies]
        yield
    finally:
        for keywords, names in changed:
            keywords["adapter_names"] = names


def adapters_agree(model: nn.Module, rows: int, copies: int) -> bool:
    """Whether equal rows run under equal adapters."""
    for keywords in _adapter_keywords(model, rows):
        names = keywords["adapter_names"]
        if any(names[i] != names[i - i % copies] for i in range(rows)):
            return False
    return True


def _adapter_keywords(model: nn.Module, rows: int) -> Iterator[dict[str, Any]]:
    """The keywords of the hooks with which peft hands each layer its rows' adapters."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, partial) and _is_list_of(hook.keywords.get("adapter_names"), rows):
                yield hook.keywords


def _is_list_of(value: object, rows: int) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == rows
