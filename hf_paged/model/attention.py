"""The attention function and the mask function that transformers' registries know as "hf_paged"."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kv import Seen, Sequences
from ..kv.reference import invariant
from .lazy import LazyMask, LazyPages, LazyTensor, NotCapturable, NotFlat, as_dense
from .lengths import GrowingOnes
from .mla import LazyExpanded
from .switch import original_implementation, sdpa_refuses_softcap
from .traced import UNDERSTOOD, Stored, attend_traced

NAME = "hf_paged"
WIDEST = 8192
"""Positions of latents that a captured step may read, however few of them are filled."""
EVERYTHING = Seen(0, causal=True)
"""All that a causal mask without a window shows."""
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class OnPages(Protocol):
    """A cache whose rows are known: generate()'s, or the one with which the engine runs a step."""

    sequences: Sequences
    reuse: Any
    """Its reuse of prefixes, both found and left to others; None if none."""


class Forward(NamedTuple):
    """The forward that is running: its cache, and whether stock's own attention must be used.

    flat: whether several sequences share one row, which only the pages can separate.
    """

    cache: OnPages
    dense: bool = False
    flat: bool = False

    def column(self, name: str, device: torch.device) -> torch.Tensor | None:
        """The numbers of its rows in a column (blocks/columns.py), on a device; None if all are empty."""
        return self.cache.sequences.column(name, device)


running: ContextVar[Forward | None] = ContextVar("hf_paged_forward", default=None)


# ---- masks


def paged_mask(**arguments: Any) -> torch.Tensor | None:
    """Make an attention mask: lazy where pages imply the same, else what the model's own setting makes."""
    forward = running.get()
    if forward is not None and forward.flat:
        return _flat_mask(arguments, forward.cache)
    implementation = _dense_implementation(original_implementation(arguments["config"]))
    captured = forward is not None and forward.cache.sequences.static is not None
    if captured:
        arguments["allow_is_bidirectional_skip"] = (
            False  # stock would check on the host whether there is padding
        )
    plain = forward is not None and _says_no_more(arguments, forward.cache)
    if forward is not None and not plain:
        _keep_to_yourself(forward.cache)
    if forward is None or forward.dense or not plain:
        mask: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[implementation](**arguments)
        return mask

    def as_stock() -> torch.Tensor | None:
        if captured:
            raise NotCapturable("the model computes with its attention mask, which grows from step to step")
        given: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[implementation](**arguments)
        return given

    def build() -> torch.Tensor:
        arguments["allow_is_causal_skip"] = False
        made = as_stock()
        assert made is not None
        return made

    shape = (arguments["batch_size"], 1, arguments["q_length"], 1 if captured else arguments["kv_length"])
    dtype = torch.bool if implementation == "sdpa" else arguments["dtype"]
    return LazyMask(
        shape, dtype, torch.device(arguments["device"]), arguments.get("local_size"), build, as_stock
    )


def _keep_to_yourself(cache: OnPages) -> None:
    """Under a mask by which tokens see later ones, no other prompt may begin with these keys and values."""
    if cache.reuse is not None:
        cache.reuse.disable("the attention mask is more than causal or sliding")


def _flat_mask(arguments: dict[str, Any], cache: OnPages) -> torch.Tensor:
    """The mask of a row of several sequences, which must not be read."""
    if not _says_no_more(arguments, cache):
        raise NotFlat("the attention mask is more than causal or sliding")

    def build() -> torch.Tensor:
        raise NotFlat("the model computes with its attention mask")

    shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
    return LazyMask(shape, torch.bool, torch.device(arguments["device"]), arguments.get("local_size"), build)


def _says_no_more(arguments: dict[str, Any], cache: OnPages) -> bool:
    """True if a mask is plainly causal or sliding over rows whose padding the cache knows.

    Overlays and packed sequences forbid stock to skip the mask; chunked attention resembles a window but is
    none.
    """
    if not arguments.get("allow_is_causal_skip", False) or arguments.get("use_vmap", False):
        return False
    window = arguments.get("local_size")
    if window is not None and window == getattr(arguments["config"], "attention_chunk_size", None):
        return False
    padding = arguments.get("attention_mask")
    if padding is None or isinstance(padding, GrowingOnes):
        return cache.sequences.padding_known
    return cache.sequences.padding_known and bool(
        padding.shape[-1] == arguments["q_offset"] + arguments["q_length"]
    )


# ---- attention


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend from the pages; cases that they do not cover are left to the model's own attention on dense
    tensors.

    query [rows, query_heads, new, key_dim] -> [rows, new, query_heads, value_dim].
    """
    if isinstance(key, Stored):
        return attend_traced(query, key, value, kwargs), None
    if isinstance(query, LazyTensor):
        query = query.dense()
    if isinstance(attention_mask, LazyMask) and query.shape[2] > 1 and not getattr(module, "is_causal", True):
        # Such a layer is causal only under a mask, and stock leaves masks out that are plainly causal: we
        # answer as stock does.
        attention_mask = attention_mask.as_stock()
    if isinstance(key, LazyPages) and isinstance(value, LazyPages):
        out = _attend_pages(module, query, key, value, attention_mask, kwargs)
        if out is not None:
            key.layer.path = "paged"
            return out, None
    elif isinstance(key, LazyExpanded) and isinstance(value, LazyExpanded):
        out = _attend_latents(module, query, key, attention_mask, kwargs)
        if out is not None:
            key.expansion.latents.layer.path = "paged"
            return out, None
    stock = _stock_attention(module)
    return stock(module, query, as_dense(key), as_dense(value), as_dense(attention_mask), **kwargs)


def _attend_pages(
    module: nn.Module,
    query: torch.Tensor,
    key: LazyPages,
    value: LazyPages,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Attention from the pages, or None if this call wants something else."""
    forward = running.get()
    if forward is None or forward.dense or not _plain(module, kwargs):
        return None
    if invariant.get() and original_implementation(module.config) == "eager":
        return None  # it rounds between its steps
    if mask is None and query.shape[2] > 1 and _causal_cross(module, key, kwargs):
        return None
    seen = _seen(query, key, mask, kwargs, forward)
    if seen is None:
        return None
    pages = key.pages
    bias = kwargs.get("position_bias")
    if pages.batch.packed and (not seen.causal or bias is not None):
        raise NotFlat("the attention mask or a bias decides which token attends to which")
    if bias is not None:
        if seen.causal and pages.batch.captured:
            raise NotCapturable("the attention has a bias for every pair of positions")
        seen = seen.biased(bias, pages.batch)
    new = None
    if key.step_tokens is not None and value.step_tokens is not None:
        new = (key.step_tokens, value.step_tokens)
    softcap = kwargs.get("softcap")
    sinks = kwargs.get("s_aux")
    if (softcap is not None or sinks is not None) and drops_caps(module):
        softcap = sinks = None
    scale = kwargs.get("scaling")
    return pages.ops.attend(query, pages, seen, new, scale=scale, softcap=softcap, sinks=sinks)


def _attend_latents(
    module: nn.Module,
    query: torch.Tensor,
    key: LazyExpanded,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Attention from the pages of latents, or None if this call wants something else."""
    forward = running.get()
    latents = key.expansion.latents
    more = any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
    if forward is None or forward.dense or more or not _plain(module, kwargs):
        return None
    if invariant.get():  # a forward without a cache expands latents, which rounds otherwise
        return None
    batch = latents.pages.batch
    if batch.captured and batch.positions > WIDEST:
        raise NotCapturable("latents are read over all positions that the tables have")
    seen = _seen(query, latents, mask, kwargs, forward)
    if batch.packed:
        if seen is None or not seen.causal:
            raise NotFlat("the attention mask decides which token attends to which")
    elif seen is None or key.expansion.weights(query) is None:
        return None
    scale = query.shape[3] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
    return key.expansion.attend(query, seen, scale)


def _seen(
    query: torch.Tensor, key: LazyPages, mask: torch.Tensor | None, kwargs: dict[str, Any], forward: Forward
) -> Seen | None:
    """The columns that each new token sees by the mask, or None if the pages have no words for it."""
    cross = not key.layer.kind.grows
    window = key.layer.kind.window
    if isinstance(mask, LazyMask):
        # A layer with a window under a mask without one sees what stock's cache would hold.
        if cross or window not in (None, mask.window) or kwargs.get("is_causal") is False:
            return None
        if mask.window is None:
            return EVERYTHING
        return Seen(key.pages.batch.first_visible(mask.window), causal=True, window=mask.window)
    if not cross:
        _keep_to_yourself(forward.cache)
    if not cross and key.pages.batch.captured:
        raise NotCapturable("the attention mask is more than causal or sliding")
    if mask is None:
        return Seen(0) if cross else None
    fits = mask.ndim == 4 and mask.shape[0] in (1, query.shape[0]) and mask.shape[1] in (1, query.shape[1])
    return Seen(key.first, mask) if fits and mask.shape[2:] == (query.shape[2], key.columns) else None


def _causal_cross(module: nn.Module, key: LazyPages, kwargs: dict[str, Any]) -> bool:
    """True if stock's cross attention is causal: sdpa's is without a mask, unless its module says no."""
    if key.layer.kind.grows or _dense_implementation(_setting(module)) != "sdpa":
        return False
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _plain(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """True if the keywords contain nothing beyond scale, softcap, sinks and a bias."""
    if kwargs.get("dropout") and module.training:
        return False
    if kwargs.get("softcap") is not None and drops_caps(module) and sdpa_refuses_softcap():
        return False  # stock raises the error
    return UNDERSTOOD.issuperset(kwargs) or all(
        name in UNDERSTOOD or setting is None or setting is False for name, setting in kwargs.items()
    )


# ---- the model's own setting


def drops_caps(module: nn.Module) -> bool:
    """True if the model's own setting ignores softcap and sinks, whatever the model passes: so do we."""
    return _setting(module) == "sdpa"


def _setting(module: nn.Module) -> str:
    return original_implementation(getattr(module, "config", None))


def _dense_implementation(original: str) -> str:
    """The setting that works on dense tensors: the model's own if it is one of the two that take any mask."""
    return original if original in ("eager", "sdpa") else "sdpa"


def _stock_attention(module: nn.Module) -> Attention:
    implementation = _setting(module)
    dense: Attention | None = ALL_ATTENTION_FUNCTIONS.get(_dense_implementation(implementation))
    if dense is not None:
        return dense
    # "eager" is not in the registry: each model file has its own.
    for cls in type(module).__mro__:
        eager: Attention | None = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise RuntimeError(
        f"{type(module).__name__} has no eager attention to fall back to; load the model with "
        "attn_implementation='sdpa'"
    )
