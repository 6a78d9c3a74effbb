"""Keys and values that peft puts in front of a prompt (prefix tuning, Cartridge), taken into pages."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn
from transformers.cache_utils import DynamicCache

from ..model.prompt_learning import PASTS, kind_of, past_in
from .cache import PagedCache
from .padding import rows_of

prepared: ContextVar[PagedCache | None] = ContextVar("hf_paged_prepared", default=None)
"""The cache that the running call has prepared for its decoder."""


def with_given_past(model: nn.Module, arguments: Mapping[str, Any], cache: Any) -> PagedCache | None:
    """The call's own cache with the keys and values that peft has put in its place; None for any other cache.

    All rows have the same: they are written once, and the rows share their blocks.
    """
    own = prepared.get()
    rows = rows_of(arguments)
    if own is None or own.model is not model or own.sequences.columns or not _is_given(model, cache, rows):
        return None
    past = past_in(cache)
    if past is None or len(past) != len(own.layers) or own.own_layers != own.layers or not own.complete:
        return None
    with own.sequences.memory.lock:
        own.sequences.expect(own.sequences.expected + past[0][0].shape[2])
        for layer, (keys, values) in zip(own.own_layers, past, strict=True):
            layer.update(keys[:1], values[:1])
        own.batch_repeat_interleave(rows)
    if own.reuse is not None:
        own.reuse.disable("peft puts keys and values in front of the prompt")
    return own


def _is_given(model: nn.Module, cache: Any, rows: int) -> bool:
    """True if peft has made a cache for so many rows."""
    if type(cache) is not DynamicCache or not cache.get_seq_length():
        return False
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    config = getattr(owner, "active_peft_config", None)
    layer: Any = cache.layers[0]
    return kind_of(config) in PASTS and layer.keys.shape[0] == rows
