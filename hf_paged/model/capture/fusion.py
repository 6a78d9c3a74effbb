"""The small operations of a captured step in fewer launches: kernels that round as the modules' own code
does.

Modules are known by their code, not by their name: what reads like Llama's norm is Llama's norm. Weights stay
where they are, and outside the capture nothing is changed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from types import ModuleType
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.nn.functional import gelu
from transformers.activations import ACT2FN

from ...kv import fork_safe_lock
from ...kv.ops import on
from ...kv.reference import invariant
from ..adapters.apply import read_together
from ..device_map import runs_class_forward
from ..lazy import Rotation, as_dense
from ..mla import expanding_classes
from ..patches import ReplacedForward
from ..ranks.symmetric_memory import FUSED, SENT, LazySum, memory_of, shots_of
from ..ranks.tensor_parallel import mesh_of
from ..source import STANDS_FOR, reads_like
from ..state_functions import StateFunctions, stepping
from . import gemv
from .branches import Product, at_once, beside, products_of
from .chains import Chains, Noted, computed
from .experts import calls_of, gate_of, is_mixture, of_experts
from .products import fused_product

ROTARY = "apply_rotary_pos_emb"
changing = fork_safe_lock()
"""Modules of transformers are changed by one capture at a time."""


class Fusion:
    """Replacements of a captured forward's own small operations."""

    def __init__(self, model: nn.Module, kernels: Any) -> None:
        self.kernels = kernels
        self.ahead: tuple[nn.Module, torch.Tensor, int, torch.Tensor] | None = None
        """A norm whose answer was made together with its input."""
        self._ready: tuple[torch.Tensor, int, dict[nn.Linear, torch.Tensor]] | None = None
        """An input, and products of it by layers that will be called for them."""
        self.following: dict[nn.Module, nn.Module] = {}
        """The norm that reads what a layer answers."""
        self._last: set[nn.Module] = set()
        """Of these norms those behind which a stack ends."""
        self._norms_alone = True
        """True if one kernel adds and norms. Other layers do more around their norms, which are in chains."""
        self._in_chains = False
        self._foreseen: dict[Hashable, Callable[[], object]] | None = None
        """Calls of chains' kernels, while torch computes the chains."""
        self._device_type = next((each.device.type for each in model.parameters()), "cpu")
        self._mesh = mesh_of(model)
        self.ranks = None if self._mesh is None else memory_of(self._mesh.get_group())
        """The memory for sums of a divided model's ranks."""
        self.forwards: dict[nn.Module, Callable[..., Any]] = {}
        self.gates: dict[nn.Module, str | None] = {}
        """The mixtures of experts, and the activation of their gates where kernels have it."""
        self.few_rows: dict[nn.Module, Sequence[nn.Linear]] = {}
        """Layers whose products of few rows a kernel computes, and those that it computes in one launch."""
        self.rotaries: set[str] = set()
        """The module files whose rotary embedding is Llama's."""
        self.states = StateFunctions(model)
        if kernels is not None:
            self._look_at(model)

    def _look_at(self, model: nn.Module) -> None:
        self._norms_alone = any(map(is_layer, model.modules()))
        expanding = {*expanding_classes(model.modules())}
        absorbed = {each.kv_b_proj for each in model.modules() if type(each) in expanding}
        for module in model.modules():
            replacement = self._replacement(module)
            if replacement is not None and runs_class_forward(module):
                self.forwards[module] = replacement
            for products in products_of(module):
                self.forwards.update({layer: partial(self.product, layer, products) for layer in products})
                if self._mesh is None and all(map(gemv.may_read, products)):
                    self.few_rows.update({layer: [*products] for layer in products})
            alone = self._mesh is None and module not in self.forwards and module not in absorbed
            if alone and gemv.may_read(module):
                self.forwards[module] = partial(self.linear, module)
                self.few_rows[module] = [module]
        for module in model.modules():
            self._chain(module)
        self.rotaries = {
            name for module in model.modules() if rotates_like_llama(name := type(module).__module__)
        }

    def _replacement(self, module: nn.Module) -> Callable[..., Any] | None:
        if is_norm(module):
            return partial(self.norm, module)
        if reads_like(type(module).forward, llama().LlamaMLP.forward) and activation(module) is not None:
            return partial(self.feed_forward, module)
        if is_layer(module):
            return partial(self.layer, module)
        if self._mesh is None and is_mixture(module):
            gate = self.gates[module] = gate_of(module, activation)
            return partial(of_experts, self.kernels, gate, module)
        return None

    def _chain(self, module: nn.Module) -> None:
        """Note for each layer of a stack which norm comes next."""
        layers = getattr(module, "layers", None)
        last = getattr(module, "norm", None)
        if not isinstance(layers, nn.ModuleList) or not isinstance(last, nn.Module) or not is_norm(last):
            return
        norms = [*(getattr(layer, "input_layernorm", None) for layer in list(layers)[1:]), last]
        self.following.update(
            (layer, norm)
            for layer, norm in zip(layers, norms, strict=True)
            if isinstance(norm, nn.Module) and is_norm(norm)
        )
        self._last.add(last)

    def digest(self, model: nn.Module) -> int:
        """A number for which modules of the model are replaced by what."""
        ours: dict[nn.Module, Any] = self.forwards
        names = [
            (name, ours[module].func.__name__) for name, module in model.named_modules() if module in ours
        ]
        return crc32(repr([names, sorted(self.rotaries), sorted(self.states.known)]).encode())

    def calls(self, rows: int, dtype: torch.dtype) -> list[Callable[[], object]]:
        """A call of each kernel for the modules that are replaced, on tensors [rows, 1, n] without data: it
        compiles the kernel.
        """
        calls: dict[Any, Callable[[], object]] = {}
        norms = {module for module in self.forwards if is_norm(module)}
        alone = self._norms_alone or self._mesh is not None
        widest = max([len(module.weight) for module in norms], default=0)  # type: ignore[arg-type]
        for layers in self.few_rows.values():
            calls.update(gemv.calls_of(self.kernels, layers, rows, dtype))
        for module, gate in self.gates.items():
            calls.update(calls_of(self.kernels, gate, module, rows, dtype))
        for module in self.forwards:
            if module in norms:
                if not alone:
                    continue
                weight: Any = torch.empty_like(module.weight, device="meta")  # type: ignore[arg-type]
                x = torch.empty(rows, 1, len(weight), dtype=dtype, device="meta")
                centered = is_centered(module)
                key = len(weight), weight.dtype, centered
                calls.setdefault(key, partial(self.kernels.rms_norm, x, weight, 0.0, centered=centered))
                if len(weight) == widest:  # of what layers add up
                    calls.setdefault(
                        (*key, "added"),
                        partial(self.kernels.add_rms_norm, x, x, weight, 0.0, centered=centered),
                    )
                    ranks = 0 if self._mesh is None else self._mesh.size()
                    if self._mesh is not None and ranks in FUSED and dtype.itemsize in SENT:
                        inbox = torch.empty(ranks, FUSED[ranks][1] // x.itemsize, dtype=dtype, device="meta")
                        given = x[:1], [inbox] * ranks, self._mesh.get_local_rank(), x[:1], weight, 0.0
                        for shots in shots_of(ranks):  # whatever the rows are
                            summed = partial(self.kernels.reduce_add_rms_norm, *given, shots=shots)
                            calls.setdefault((*key, shots), partial(summed, centered=centered))
            elif isinstance(width := getattr(getattr(module, "gate_proj", None), "out_features", None), int):
                x = torch.empty(rows, 1, width, dtype=dtype, device="meta")
                name = activation(module)
                calls.setdefault((width, name), partial(self.kernels.swiglu, x, x, activation=name))
        return list(calls.values())

    @property
    def has_chains(self) -> bool:
        """True if kernels compute small operations in chains. Not on several ranks: their sums lie in memory
        that the next sum takes, and collectives take data.
        """
        return self.kernels is not None and self._mesh is None

    @contextmanager
    def foreseeing(self) -> Iterator[dict[Hashable, Callable[[], object]]]:
        """Let torch compute chains, and note a call of each one's kernel on tensors without data."""
        self._foreseen = {}
        try:
            yield self._foreseen
        finally:
            self._foreseen = None

    @contextmanager
    def chained(self) -> Iterator[None]:
        """Let small operations of this thread's forward be computed in chains, where kernels can."""
        recorded = torch.is_grad_enabled() or torch.is_autocast_enabled(self._device_type)
        if not self.has_chains or recorded or invariant.get():
            yield
            return
        self._in_chains = True
        try:
            with Chains(self.kernels, self._foreseen) as chains:
                yield
                chains.compute_all()
        finally:
            self._in_chains = False

    # ---- what the modules do instead

    def take_ahead(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The norm of x, if it was made together with it."""
        ahead = self.ahead
        self.ahead = None
        if ahead is not None and ahead[0] is module and ahead[1] is x and ahead[2] == _version(x):
            return ahead[3]
        return None

    def leave_ahead(self, module: nn.Module, x: torch.Tensor, normed: torch.Tensor) -> None:
        """Keep the value that `module` will be called for next."""
        self.ahead = (module, x, _version(x), normed)

    def norm(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        known = self.take_ahead(module, x)
        if known is not None:
            return known
        if self._in_chains and (not self._norms_alone or (isinstance(x, Noted) and x.note.waits)):
            chained: torch.Tensor = type(module).forward(module, x)
            return chained
        with on(x.device):
            normed: torch.Tensor = self.kernels.rms_norm(
                as_dense(x), module.weight, epsilon(module), centered=is_centered(module)
            )
        return normed

    def add_norm(
        self, module: nn.Module, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, and its norm."""
        given = residual, module.weight, epsilon(module)
        centered = is_centered(module)
        with on(x.device):
            if isinstance(x, LazySum):
                of_ranks = x.add_norm(self.kernels, *given, centered=centered)
                if of_ranks is not None:
                    return of_ranks
                x = x.dense()
            both: tuple[torch.Tensor, torch.Tensor] = self.kernels.add_rms_norm(
                *map(computed, (x, *given)), centered=centered
            )
        return both

    def _sums_wait(self) -> AbstractContextManager[None]:
        """Where a module's answer, a sum over ranks, is only added to something and read by a norm."""
        return nullcontext() if self.ranks is None else self.ranks.waiting()

    def product(self, layer: nn.Linear, products: dict[nn.Linear, Product], x: torch.Tensor) -> torch.Tensor:
        """A layer's product of x. products: those of all layers that are given the same input."""
        x = computed(x)  # before streams part
        ready = self._ready
        if ready is None or ready[0] is not x or ready[1] != _version(x) or layer not in ready[2]:
            found = None
            if layer in self.few_rows:
                found = gemv.few_rows(self.kernels, x, self.few_rows[layer])
            if found is None:
                found = fused_product(x, [*products])
            if found is None and at_once(x):
                found = beside(x, [*products.values()])
            if found is None:
                return products[layer](x)
            self._ready = ready = x, _version(x), dict(zip(products, found, strict=True))
        answer = ready[2].pop(layer)
        if not ready[2]:
            self._ready = None
        return answer

    def still_stands_for(self, module: nn.Module) -> bool:
        """False for a layer of few rows that has been lent another forward since, as a head in float32 is."""
        return module not in self.few_rows or runs_class_forward(module)

    def linear(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """The product of a layer that shares its input with no other."""
        x = computed(x)
        found = gemv.few_rows(self.kernels, x, self.few_rows[layer])
        return nn.Linear.forward(layer, x) if found is None else found[0]

    def feed_forward(self, module: Any, x: torch.Tensor) -> Any:
        with read_together(module.up_proj):
            gate = module.gate_proj(x)
            up = module.up_proj(x)
        with on(x.device):
            gated = self.kernels.swiglu(computed(gate), computed(up), activation=activation(module))
        return module.down_proj(gated)

    def layer(self, module: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normed = module.input_layernorm(hidden_states)
        with self._sums_wait():
            attended, _ = module.self_attn(hidden_states=normed, **kwargs)
        residual, normed = self.add_norm(module.post_attention_layernorm, attended, hidden_states)
        following = self.following.get(module)
        with nullcontext() if following is None or following in self._last else self._sums_wait():
            fed: torch.Tensor = module.mlp(normed)
        if following is None:
            return residual + fed
        total, normed = self.add_norm(following, fed, residual)
        self.leave_ahead(following, total, normed)
        return total

    def rotary(
        self,
        stock: Callable[..., Any],
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> Any:
        if unsqueeze_dim != 1 or cos.ndim != 3 or not q.dtype == k.dtype == cos.dtype == sin.dtype:
            return stock(q, k, cos, sin, unsqueeze_dim)
        return Rotation(self.kernels, *map(computed, (q, k, cos, sin))).lazy()

    def substitute(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces a module file's rotary embedding meanwhile."""
        return _only_here(self, partial(self.rotary, stock), stock)

    def functions(self) -> Iterator[tuple[ModuleType, str, Callable[..., Any], Callable[..., Any]]]:
        """Functions of module files that are replaced meanwhile: where, the name, the function, and ours."""
        for file in self.rotaries:
            place = sys.modules[file]
            stock = getattr(place, ROTARY)
            yield place, ROTARY, stock, self.substitute(stock)


current_fusion: ContextVar[Fusion | None] = ContextVar("hf_paged_fusion", default=None)


@contextmanager
def fused(fusion: Fusion) -> Iterator[None]:
    """Let the model's modules call the fusion, in this thread; other threads get the modules' own code."""
    with changing:
        functions = [*fusion.functions()]
        replaced = [
            _replaced(fusion, module, forward)
            for module, forward in fusion.forwards.items()
            if fusion.still_stands_for(module)
        ]
        for each in replaced:
            each.replace()
        for place, name, _, ours in functions:
            setattr(place, name, ours)
        token = current_fusion.set(fusion)
        states = stepping.set(fusion.states)
        try:
            fusion.states.put_in()
            with nullcontext() if fusion.ranks is None else fusion.ranks.forward(), fusion.chained():
                yield
        finally:
            stepping.reset(states)
            fusion.states.take_out()
            current_fusion.reset(token)
            for each in replaced:
                each.restore()
            for place, name, stock, _ in functions:
                setattr(place, name, stock)


def _replaced(fusion: Fusion, module: nn.Module, forward: Callable[..., Any]) -> ReplacedForward:
    own = module.__dict__.get("forward")
    stock = own or partial(type(module).forward, module)
    return ReplacedForward(module, own, _only_here(fusion, forward, stock))


def _only_here(fusion: Fusion, ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (ours if current_fusion.get() is fusion else stock)(*args, **kwargs)

    setattr(choose, STANDS_FOR, stock)
    return choose


# ---- whose code reads like whose


@cache
def llama() -> Any:
    """Llama's own code; loaded when first compared with."""
    return importlib.import_module("transformers.models.llama.modeling_llama")


@cache
def gemma_norm() -> Any:
    """Gemma's norm."""
    return importlib.import_module("transformers.models.gemma.modeling_gemma").GemmaRMSNorm


def is_norm(module: object) -> bool:
    """True if a module computes what the kernel for root-mean-square norms does."""
    if not isinstance(module, nn.Module) or not runs_class_forward(module):
        return False
    return reads_like(type(module).forward, llama().LlamaRMSNorm.forward) or is_centered(module)


def is_layer(module: Any) -> bool:
    """True if a module adds and norms as Llama's decoder layers do."""
    like = reads_like(type(module).forward, llama().LlamaDecoderLayer.forward)
    return like and is_norm(module.post_attention_layernorm)


def is_centered(module: object) -> bool:
    """True if it is Gemma's norm, whose weight is what is added to one."""
    kind: Any = type(module)
    return reads_like(kind.forward, gemma_norm().forward) and reads_like(
        getattr(kind, "_norm", None), gemma_norm()._norm
    )


def epsilon(module: Any) -> float:
    return float(module.eps if is_centered(module) else module.variance_epsilon)


def activation(module: Any) -> str | None:
    """The kernel's name for a feed-forward layer's activation."""
    function = module.act_fn
    if not isinstance(function, nn.Module) or not runs_class_forward(function):
        return None
    code = type(function).forward
    inner = function.__dict__.get("act")
    if reads_like(code, nn.SiLU.forward) or reads_like(code, type(ACT2FN["silu"]).forward):
        return "silu"
    tanh = (
        isinstance(inner, partial)
        and inner.func is gelu
        and (inner.args, inner.keywords) == ((), {"approximate": "tanh"})
    )
    return "gelu_tanh" if tanh and reads_like(code, type(ACT2FN["gelu_pytorch_tanh"]).forward) else None


def _version(x: torch.Tensor) -> int:
    """How often a tensor was written to, where torch counts that."""
    return 0 if x.is_inference() else x._version


@cache
def rotates_like_llama(name: str) -> bool:
    """True if a module file's rotary embedding is Llama's."""
    place: ModuleType | None = sys.modules.get(name)
    functions = (ROTARY, "rotate_half")
    return all(
        reads_like(getattr(place, function, None), getattr(llama(), function)) for function in functions
    )
