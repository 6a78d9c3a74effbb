"""Keys and values that a model keeps as latents (MLA): steps of few tokens read them as they are, and expand nothing of the past.

Such a model expands what its cache hands out before it asks for attention. Here the expansion waits; when attention is asked for,
the queries go to the latents instead: q (W c) = (q W) c.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .fused import STANDS_FOR, reads_like
from .lazy import LazyPages, LazyTensor

METHOD = "expand_kv"
_stocks: dict[type, Callable[..., Any]] = {}
"""Classes of attention whose expansion waits, and their own way of doing it."""


class Expansion:
    """What a layer's latents stand for: its heads' keys and values, made once and only if somebody looks."""

    def __init__(self, module: Any, latents: LazyPages, turned: LazyPages, expand: Callable[..., Any]) -> None:
        self.module, self.latents, self.turned, self._expand = module, latents, turned, expand
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy(self) -> tuple[LazyExpanded, LazyExpanded]:
        """Keys and values as they will be: [rows, heads, columns, dim]."""
        rows, columns = self.latents.shape[0], self.latents.columns
        widths = self.module.qk_nope_head_dim + self.turned.shape[3], self.module.v_head_dim
        return tuple(LazyExpanded.of(self, which, (rows, self.heads, columns, width)) for which, width in enumerate(widths))  # type: ignore[return-value]

    @property
    def heads(self) -> int:
        heads: int = self.module.kv_b_proj.weight.shape[0] // (self.module.qk_nope_head_dim + self.module.v_head_dim)
        return heads

    def made(self, which: int) -> torch.Tensor:
        """Keys (number 0) or values (number 1), as stock expands them."""
        if self._made is None:
            self._made = self._expand(self.module, self.latents.dense(), self.turned.dense())
        return self._made[which]

    def weights(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What makes keys [heads, nope, rank] and values [heads, value_dim, rank] of latents, where that may go to the queries.

        None if the projection is more than a matrix (adapters, hooks, quantized or sharded weights), or if the step has so many
        new tokens that expanding is less work.
        """
        module, projection = self.module, self.module.kv_b_proj
        if type(projection) is not nn.Linear or projection.bias is not None or type(projection.weight) is not nn.Parameter:
            return None
        if "forward" in projection.__dict__ or projection._forward_hooks or projection._forward_pre_hooks:
            return None
        nope, value, rank = module.qk_nope_head_dim, module.v_head_dim, projection.in_features
        if query.shape[1] != self.heads or query.dtype != projection.weight.dtype:
            return None
        if query.shape[2] * (2 * rank - nope - value) > rank * (nope + value):
            return None
        by_head = projection.weight.view(self.heads, nope + value, rank)
        return by_head[:, :nope], by_head[:, nope:]


class LazyExpanded(LazyTensor):
    """Keys or values of all heads that nobody has expanded yet."""

    expansion: Expansion
    which: int

    @classmethod
    def of(cls, expansion: Expansion, which: int, shape: tuple[int, ...]) -> LazyExpanded:
        """Keys are number 0, values number 1."""
        made = cls(shape, expansion.latents.dtype, expansion.latents.device)
        made.expansion, made.which = expansion, which
        return made

    def _make(self) -> torch.Tensor:
        return self.expansion.made(self.which)


# ---- the models' own expansion


def let_wait(model: nn.Module) -> None:
    """Make the expansions of the model's attention wait, wherever they are the ones that we know."""
    classes: set[Any] = {type(module) for module in model.modules()}
    for cls in classes:
        if cls not in _stocks and _is_known(cls):
            method = getattr(cls, METHOD)
            _stocks[cls] = getattr(method, STANDS_FOR, method)  # a module that was reloaded has left its wrapper
            setattr(cls, METHOD, _waiting(_stocks[cls]))
        elif cls in _stocks and getattr(cls, METHOD) is _stocks[cls]:  # an interrupt came in between
            setattr(cls, METHOD, _waiting(_stocks[cls]))


def let_be() -> None:
    """Give every class its own expansion back."""
    for cls, stock in _stocks.items():
        setattr(cls, METHOD, stock)
    _stocks.clear()


def _waiting(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        if isinstance(kv_nope, LazyPages) and isinstance(k_rot, LazyPages):
            return Expansion(self, kv_nope, k_rot, stock).lazy()
        return stock(self, kv_nope, k_rot)

    setattr(expand_kv, STANDS_FOR, stock)
    return expand_kv


@functools.cache
def _is_known(cls: Any) -> bool:
    """Whether a class expands as DeepSeek does."""
    method = getattr(cls, METHOD, None)
    if method is None:
        return False
    known = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3").DeepseekV3Attention
    return METHOD in vars(cls) and reads_like(method, getattr(known, METHOD))
