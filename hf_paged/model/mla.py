"""Keys and values that a model keeps as latents (MLA): steps of few tokens read the latents, and expand
nothing of the past.

Such a model expands what its cache returns before it calls attention. Here the expansion is deferred; when
attention is called, the queries are projected to the latents instead: q (W c) = (q W) c.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..kv import Seen, fork_safe_lock, reference
from .lazy import LazyPages, LazyTensor
from .source import STANDS_FOR, reads_like

METHOD = "expand_kv"
_stocks: dict[type, Callable[..., Any]] = {}
"""Classes of attention whose expansion is deferred, and their own method."""
_lock = fork_safe_lock()


class Expansion:
    """The expansion of a layer's latents: its heads' keys and values, made once and only if they are read."""

    def __init__(
        self, module: Any, latents: LazyPages, rotated: LazyPages, expand: Callable[..., Any]
    ) -> None:
        self.module = module
        self.latents = latents
        self.rotated = rotated
        self._expand = expand
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy(self) -> tuple[LazyExpanded, LazyExpanded]:
        """Keys and values as they will be: [rows, heads, columns, dim]."""
        rows = self.latents.shape[0]
        columns = self.latents.columns
        widths = self.module.qk_nope_head_dim + self.rotated.shape[3], self.module.v_head_dim
        shapes = [(rows, self.heads, columns, width) for width in widths]
        return LazyExpanded.of(self, 0, shapes[0]), LazyExpanded.of(self, 1, shapes[1])

    @property
    def heads(self) -> int:
        """Those that this process computes: of ranks a part."""
        weight = self.module.kv_b_proj.weight
        own: torch.Tensor = getattr(weight, "_local_tensor", weight)
        heads: int = len(own) // (self.module.qk_nope_head_dim + self.module.v_head_dim)
        return heads

    def made(self, which: int) -> torch.Tensor:
        """Keys (number 0) or values (number 1), as stock expands them."""
        if self._made is None:
            self._made = self._expand(self.module, self.latents.dense(), self.rotated.dense())
        return self._made[which]

    def attend(self, query: torch.Tensor, seen: Seen, scale: float) -> torch.Tensor:
        """Attention of query [rows, heads, new, key_dim] over latent pages: [rows, new, heads, value_dim]."""
        new = (self.latents.step_tokens, self.rotated.step_tokens)
        known = None if new[0] is None or new[1] is None else (new[0], new[1])
        pages = self.latents.pages
        return pages.ops.attend_latents(
            query, pages, seen, self._attend, self.module.v_head_dim, known, scale=scale
        )

    def _attend(
        self,
        query: torch.Tensor,
        latents: torch.Tensor,
        rotated: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        causal: bool = False,
        scale: float,
    ) -> torch.Tensor:
        """The same over latents [rows, 1, columns, rank] and rotary parts [rows, 1, columns, rope].

        Few queries go to the latents as q (W c) = (q W) c; for many the latents are expanded.
        """
        weights = self.weights(query)
        if weights is None:
            keys, values = self._expand(self.module, latents, rotated)
            return reference.attend(query, keys, values, mask, causal=causal, scale=scale)
        if causal:
            new = query.shape[2]
            mask = torch.ones(new, new, dtype=torch.bool, device=query.device).tril()[None, None]
        of_keys, of_values = weights
        plain, rotary = query.split([of_keys.shape[1], query.shape[3] - of_keys.shape[1]], -1)
        out = reference.attend_latents(plain @ of_keys, rotary, latents, rotated, mask, scale)
        return (out @ of_values.transpose(1, 2)).transpose(1, 2).contiguous()

    def weights(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weights for keys [heads, nope, rank] and values [heads, value_dim, rank], where the queries may
        absorb them.

        None if the projection is more than a matrix (adapters, hooks, quantized or sharded weights), or if
        the step has so many new tokens that expanding is less work.
        """
        module = self.module
        projection = self.module.kv_b_proj
        if (
            type(projection) is not nn.Linear
            or projection.bias is not None
            or type(projection.weight) is not nn.Parameter
        ):
            return None
        if "forward" in projection.__dict__ or projection._forward_hooks or projection._forward_pre_hooks:
            return None
        nope = module.qk_nope_head_dim
        value = module.v_head_dim
        rank = projection.in_features
        if query.shape[1] != self.heads or query.dtype != projection.weight.dtype:
            return None
        if query.shape[2] * (2 * rank - nope - value) > rank * (nope + value):
            return None
        by_head = projection.weight.view(self.heads, nope + value, rank)
        return by_head[:, :nope], by_head[:, nope:]


class LazyExpanded(LazyTensor):
    """Keys or values of all heads that have not been expanded yet."""

    expansion: Expansion

    @classmethod
    def of(cls, expansion: Expansion, which: int, shape: tuple[int, ...]) -> LazyExpanded:
        """Keys are number 0, values number 1."""
        latents = expansion.latents
        made = cls(shape, latents.dtype, latents.device, functools.partial(expansion.made, which))
        made.expansion = expansion
        return made


# ---- the models' own expansion


def expanding_classes(modules: Iterable[nn.Module]) -> list[type]:
    """The attention classes of these modules that expand latents in the known way."""
    classes: set[Any] = set(map(type, modules))
    with _lock:
        return [cls for cls in classes if cls in _stocks or _is_known(cls)]


def defer_expansion(classes: Sequence[Any]) -> None:
    """Let these classes hand latents in pages to the attention function unexpanded. Twice is once.

    Latents that are ordinary tensors are expanded as ever, so other models of the class do not notice.
    """
    with _lock:
        for cls in classes:
            method = getattr(cls, METHOD)
            if cls not in _stocks:
                # A module that was reloaded has left its wrapper.
                _stocks[cls] = getattr(method, STANDS_FOR, method)
            elif method is not _stocks[cls]:
                continue
            setattr(cls, METHOD, _deferring(_stocks[cls]))


def restore_expansion() -> None:
    """Give every class its own expansion back. A running engine defers it again with its next step."""
    with _lock:
        for cls, stock in _stocks.items():
            setattr(cls, METHOD, stock)
        _stocks.clear()


def _deferring(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        if isinstance(kv_nope, LazyPages) and isinstance(k_rot, LazyPages):
            return Expansion(self, kv_nope, k_rot, stock).lazy()
        return stock(self, kv_nope, k_rot)

    setattr(expand_kv, STANDS_FOR, stock)
    return expand_kv


@functools.cache
def _is_known(cls: Any) -> bool:
    """True if a class expands as DeepSeek does."""
    method = getattr(cls, METHOD, None)
    if method is None:
        return False
    known = importlib.import_module(
        "transformers.models.deepseek_v3.modeling_deepseek_v3"
    ).DeepseekV3Attention
    return METHOD in vars(cls) and reads_like(method, getattr(known, METHOD))
