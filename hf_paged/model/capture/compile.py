"""The decoder layers of a captured step under torch.compile: one code for all layers that are alike, and no
change left in the model.

A layer is compiled whole, as it is; only its cache and its attention are one opaque operation over plain
tensors, one of which names the layer. Code of Llama's kind also makes the norm with which the next layer
begins, so that adding and norm are one kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import Cache

from ...kv import Seen
from ..attention import drops_caps
from ..caller import caller_level
from ..layer import PagedLayer
from ..lazy import LazyMask, LazyTensor, Rotation, as_dense
from ..lengths import lengths_apart
from ..source import STANDS_FOR, reads_like
from ..support import FallbackWarning
from ..traced import NotCompilable, Place, Rotated
from .fusion import Fusion, current_fusion, is_centered, is_norm, llama
from .products import join_products

BACKEND = "inductor"
"""The compiler of a traced layer."""
OPTIONS = {"emulate_precision_casts": True}
"""Inductor's: numbers are rounded where the model's own code rounds them."""
OWN_NORMS = True
"""True if norms with an addition before them are our kernel's, which reads what it adds once, where there are
kernels.
"""
MOST = 4
"""How many codes layers of one kind may need; a model whose every layer wants its own would compile for
minutes.
"""


@torch.library.custom_op(
    "hf_paged::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? cos, Tensor? sin, Tensor? sinks, Tensor tag, "
    "float? scale, float? softcap, int? window) -> Tensor",
)
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tag: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    window: int | None,
) -> torch.Tensor:
    """Store the step's keys and values [rows, heads, new, dim] in the pages of the layer of `tag`, and attend
    from there.
    """
    fusion = _running()
    layer = fusion.layer_of(tag)
    if cos is not None and sin is not None:
        query, key = Rotation(fusion.kernels, query, key, cos, sin).lazy()
    keys: Any = layer.update(key, value)[0]
    pages = keys.pages
    seen = Seen(pages.batch.first_visible(window), causal=True, window=window)
    layer.path = "paged"
    out: torch.Tensor = pages.ops.attend(
        as_dense(query), pages, seen, None, scale=scale, softcap=softcap, sinks=sinks
    )
    return out.contiguous()


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op(
    "hf_paged::add_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor weight, float eps, bool centered) -> (Tensor, Tensor)",
)
def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of x and residual [..., n], and its root-mean-square norm, in one kernel."""
    made: tuple[torch.Tensor, torch.Tensor] = _running().kernels.add_rms_norm(
        x, residual, weight, eps, centered=centered
    )
    return made


@_add_norm.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(
        x, dtype=x.dtype if centered else torch.promote_types(x.dtype, weight.dtype)
    )


def _running() -> CompiledFusion:
    fusion = current_fusion.get()
    if not isinstance(fusion, CompiledFusion):
        raise RuntimeError(
            "the operations of compiled layers work in captured steps of an engine, and no such step is "
            "running"
        )
    return fusion


# ---- what is compiled


def _whole(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module as it is."""
    return type(module).forward(module, *args, **kwargs)


def _chained(
    layer: Any,
    following: Any,
    normed: torch.Tensor,
    residual: torch.Tensor,
    own: tuple[bool, bool] | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer like Llama's without its first norm: its answer, and the norm of it with which the next layer
    begins.

    own: for our own kernel, whether the two norms are centered; None leaves them to the compiler.
    """
    attended, _ = layer.self_attn(hidden_states=normed, **kwargs)
    between = layer.post_attention_layernorm
    if own is None:
        residual = residual + attended
        total = residual + layer.mlp(between(residual))
        return total, type(following).forward(following, total)
    residual, normed = _added(between, attended, residual, own[0])
    return _added(following, layer.mlp(normed), residual, own[1])


def _added(
    norm: Any, x: torch.Tensor, residual: torch.Tensor, centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    eps = norm.eps if centered else norm.variance_epsilon
    total, normed = torch.ops.hf_paged.add_norm(x, residual, norm.weight, eps, centered)
    return total, normed


class Compilation:
    """The compiled layers of one engine's model. The codes are its own: they share no cache or limit with
    other compilations.
    """

    def __init__(self) -> None:
        self.why_not: str | None = None
        """Why nothing is compiled any more."""
        self._warned = False
        self._codes: dict[Any, Callable[..., Any]] = {}
        self._substitutes: dict[Callable[..., Any], Callable[..., Any]] = {}

    def substitute(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Stands for a rotary embedding in traced layers: always the same object, or they would be compiled
        again.
        """
        if stock not in self._substitutes:
            self._substitutes[stock] = _turn_later(self, stock)
        return self._substitutes[stock]

    def give_up(self, reason: str) -> None:
        """Stop compiling, and give the reason."""
        self.why_not = self.why_not or reason
        self.warn(reason)

    def warn(self, reason: str) -> None:
        """Warn, the first time, why layers run uncompiled."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"compile=True: {reason}; the model's layers run as they are",
                FallbackWarning,
                stacklevel=caller_level(),
            )

    def code(self, function: Callable[..., Any], *kind: Any) -> Callable[..., Any]:
        """A region compiled for layers of a kind."""
        key = (function, *kind)
        if key not in self._codes:
            self._codes[key] = self._compile(function)
        return self._codes[key]

    def _compile(self, function: Any) -> Callable[..., Any]:
        # Torch keeps what it has compiled, and counts it, by code object.
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        made = 0

        def backend(graph: Any, inputs: Any) -> Any:
            nonlocal made
            made += 1
            if made > MOST:
                raise NotCompilable(f"its layers need more than {MOST} different codes")
            return _make(graph, inputs)

        compiled: Callable[..., Any] = torch.compile(own, backend=backend, fullgraph=True)
        return compiled


def reason_of(error: BaseException) -> str:
    """A failed compilation in one line."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return ": ".join([type(inner).__name__, *lines[:1]])


def _make(graph: Any, inputs: Any) -> Any:
    from torch._dynamo import lookup_backend

    join_products(graph)
    options = {"config_patches": OPTIONS} if BACKEND == "inductor" else {}
    return lookup_backend(BACKEND)(graph, inputs, **options)


class CompiledFusion(Fusion):
    """Replacements of layers in a captured forward: the same layers compiled, and the kernels for what lies
    around them.
    """

    def __init__(
        self, model: nn.Module, kernels: Any, compilation: Compilation, cache: Sequence[Any]
    ) -> None:
        super().__init__(model, kernels)
        self.compilation = compilation
        self._tags: dict[int, PagedLayer] = {}
        layers = decoder_layers(model, len(cache))
        for module in model.modules():
            self._chain(module)
        inside = {part for layer in layers for part in layer.modules()}
        self.forwards = {module: forward for module, forward in self.forwards.items() if module not in inside}
        for layer, paged in zip(layers, cache, strict=True):
            parameter = next(layer.parameters())
            tag = torch.zeros(1, dtype=torch.float32, device=parameter.device)
            self._tags[tag.data_ptr()] = paged
            chained = layer in self.following and is_chained(layer)
            self.forwards[layer] = _bound(self._run_chained if chained else self._run_whole, layer, tag)
        for norm in self.following.values():
            if norm not in inside:
                self.forwards[norm] = _bound(self.norm, norm)
        for module in model.modules():
            if module not in inside and any(name.endswith("inv_freq") for name in module._buffers):
                self.forwards[module] = _bound(self._run_angles, module)
        if kernels is None:
            self.rotaries = set()

    def layer_of(self, tag: torch.Tensor) -> PagedLayer:
        """The layer of the cache that a traced layer uses."""
        return self._tags[tag.data_ptr()]

    @contextmanager
    def chained(self) -> Iterator[None]:
        """Small operations are in the compiled layers."""
        yield

    # ---- what the modules do instead

    def norm(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.kernels is not None:
            return super().norm(module, x)
        known = self.take_ahead(module, x)
        return type(module).forward(module, x) if known is None else known

    def _run_whole(self, layer: nn.Module, tag: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        place = self._place(layer, tag, (args, kwargs))
        args = _plain(args, place)
        kwargs = _plain(kwargs, place)
        return self._call(_whole, place, layer, args, kwargs)

    def _run_angles(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Cosines and sines of the step's positions, which take ten small operations."""
        return self._call(_whole, None, module, args, kwargs)

    def _run_chained(
        self, layer: Any, tag: torch.Tensor, hidden_states: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        place = self._place(layer, tag, kwargs)
        kwargs = _plain(kwargs, place)
        following = self.following[layer]
        normed = self.norm(layer.input_layernorm, hidden_states)
        own = (
            (is_centered(layer.post_attention_layernorm), is_centered(following))
            if OWN_NORMS and self.kernels is not None
            else None
        )
        total: torch.Tensor
        total, after = self._call(_chained, place, layer, following, normed, hidden_states, own, kwargs)
        self.leave_ahead(following, total, after)
        return total

    def _place(self, layer: nn.Module, tag: torch.Tensor, given: Any) -> Place:
        masks = [x for x in tree_leaves(given) if isinstance(x, LazyMask)]
        if len(masks) != 1:
            raise NotCompilable(
                f"a layer is given {len(masks)} masks that the pages make needless, expected 1"
            )
        window = masks[0].window
        paged = self.layer_of(tag)
        if paged.kind.window not in (None, window):
            raise NotCompilable(
                f"a layer that keeps {paged.kind.window} tokens is given a mask over {window}"
            )
        attention = next(part for part in layer.modules() if getattr(part, "layer_idx", None) is not None)
        return Place(tag, window, drops_caps(attention))

    def _call(self, function: Callable[..., Any], place: Place | None, *args: Any) -> Any:
        rows = next(x.shape[0] for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        if rows > 1:
            for x in tree_leaves(args):
                if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[0] == rows:
                    torch._dynamo.maybe_mark_dynamic(x, 0)
        with lengths_apart():
            return self.compilation.code(function, rows > 1, place and place.window, place is None)(*args)

    def substitute(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A traced layer's rotary embedding: the attention does it, where queries and keys are plain."""
        return self.compilation.substitute(stock)


def _bound(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: method(*first, *args, **kwargs)


def _plain(given: Any, place: Place) -> Any:
    """A layer's arguments for a trace: no mask, and the place instead of the cache."""

    def plain(value: Any) -> Any:
        if isinstance(value, Cache):
            return place
        if isinstance(value, LazyMask):
            return None
        if isinstance(value, LazyTensor):
            raise NotCompilable(f"a layer is given a {type(value).__name__}")
        return value

    return tree_map(plain, given)


def _turn_later(compilation: Compilation, stock: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def ours() -> bool:
        # Other code that traces the model meanwhile traces stock's.
        return getattr(current_fusion.get(), "compilation", None) is compilation

    def choose(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        if ours() and unsqueeze_dim == 1 and cos.ndim == 3 and q.dtype == k.dtype == cos.dtype == sin.dtype:
            return Rotated(q, cos, sin), Rotated(k, cos, sin)
        return stock(q, k, cos, sin, unsqueeze_dim)

    setattr(choose, STANDS_FOR, stock)
    return choose


# ---- which modules


def decoder_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """The layers of the model's stack, the i-th of which is the cache's i-th."""
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and [number_of(layer) for layer in module] == list(range(count))
        ):
            if any("forward" in layer.__dict__ for layer in module):
                raise NotCompilable("the forward of a layer was replaced")
            return list(module)
    raise NotCompilable(f"it has no list of {count} layers with a layer_idx")


def number_of(layer: nn.Module) -> int | None:
    """Which layer of the cache a decoder layer is; None if its parts name none, or several."""
    numbers = {number for part in layer.modules() if (number := getattr(part, "layer_idx", None)) is not None}
    return numbers.pop() if len(numbers) == 1 else None


def is_chained(layer: Any) -> bool:
    """True if a layer's code is Llama's."""
    return (
        reads_like(type(layer).forward, llama().LlamaDecoderLayer.forward)
        and is_norm(layer.input_layernorm)
        and is_norm(layer.post_attention_layernorm)
    )
