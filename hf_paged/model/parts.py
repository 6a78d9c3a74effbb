"""Parts of an adapter: each changes the output of one module of a model. A kind of part is a class here, and
other code asks it by the methods of `Part`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .shards import local_part

linear = nn.functional.linear
Change = Callable[[torch.Tensor], torch.Tensor]
P = TypeVar("P", bound="Part")
Parts = Mapping[str, tuple["Part", ...]]
"""The parts of an adapter, by the names of modules in a model."""
NORM_ROWS = 4096
"""Output rows of a weight whose norms are taken at once."""


class Product(NamedTuple):
    """An output as kernels compute it: factor * (y + scale * (x a^T) b^T) + shift."""

    a: torch.Tensor
    """[rank, inputs]"""
    b: torch.Tensor
    """[outputs, rank]"""
    scale: float
    factor: torch.Tensor | None = None
    """[outputs]"""
    shift: torch.Tensor | None = None
    """[outputs]"""


class Rows(NamedTuple):
    """Rows of a weight in the place of a module's own, as kernels read them."""

    rows: torch.Tensor
    """[count, width]"""
    ids: torch.Tensor | None
    """[count] int64; None for all."""
    bias: torch.Tensor | None
    """[count]"""
    scale: float
    """A factor of the rows of an embedding."""


class Part(Protocol):
    """A change of a module's output y for x, in the order and the number types of peft's
    forward.
    """

    name: ClassVar[str]
    """Its kind in errors and reasons."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Its weights."""

    @property
    def settings(self) -> Hashable:
        """Facts beside its weights."""
        return ()

    @property
    def rank(self) -> int:
        """The rank of its product; 0 if it is none."""
        return 0

    @property
    def reads_base(self) -> bool:
        """True if it is computed from the module's own weight, too."""
        return False

    @property
    def kernel(self) -> str:
        """The kernels that compute it on a device: "products", alone or with others, "scaled products",
        "shift" behind one of these, or "rows"; "" for plain torch.
        """
        return ""

    def as_product(self, base: nn.Module) -> Product | None:
        """It as the kernels of products read it."""
        return None

    def as_rows(self, base: nn.Module) -> Rows | None:
        """It as the kernels of rows read it."""
        return None

    def as_shift(self, base: nn.Module) -> torch.Tensor | None:
        """The numbers that it adds to outputs, as the kernels of products read them."""
        return None

    @property
    def alone(self) -> bool:
        """True if no part of another adapter may be active at the module."""
        return False

    @property
    def divides(self) -> bool:
        """True if ranks can have parts of it beside their parts of the module's output."""
        return False

    @property
    def stays_whole(self) -> bool:
        """True if each rank can have all of it, beside a module that gives whole outputs."""
        return False

    def vocabulary(self, known: int) -> int:
        """The ids that an embedding or a head has rows for with it, if it knows so many without it."""
        return known

    def base_behind(self, base: nn.Module) -> nn.Module:
        """The module that the parts behind it are computed from."""
        return base

    def mapped(self: P, change: Change) -> P:
        """The same part with other tensors in the place of its own, in the order of `tensors`."""

    def padded(self) -> Part:
        """The same with a rank that is a multiple of 8, as kernels read it."""
        return self

    def given(self, x: torch.Tensor) -> torch.Tensor:
        """The input as it and all parts behind it are given it."""
        return x

    def apply(self, base: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The output, not rounded to y's type yet. base: the module without adapters."""


@dataclass(eq=False)  # not frozen: made for every layer in every look, and that costs as much as all the rest
class LowRank(Part):
    """An addition to a linear layer's output: scale * ((x a^T) b^T + bias).

    With a magnitude (DoRA) each column of the sum, but for the layer's own bias, is scaled by
    magnitude / norm, the norm that of the column's weights in the layer and the product together.
    """

    name: ClassVar[str] = "DoRA or a bias"
    a: torch.Tensor
    """[rank, inputs]"""
    b: torch.Tensor
    """[outputs, rank]"""
    scale: float
    bias: torch.Tensor | None = None
    """[outputs]"""
    magnitude: torch.Tensor | None = None
    """[outputs]"""
    norm: torch.Tensor | None = None
    """[outputs]: the norms, where ranks have a part of each column: y is this one's part of the sum then,
    without the layer's own bias.
    """
    _factor: torch.Tensor | None = field(default=None, repr=False)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        if self.bias is None and self.magnitude is None:
            return self.a, self.b
        found = self.a, self.b, self.bias, self.magnitude, self.norm
        return tuple(each for each in found if each is not None)

    @property
    def settings(self) -> Hashable:
        return self.scale, self.a.shape, self.bias is None, self.magnitude is None

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def reads_base(self) -> bool:
        return self.magnitude is not None

    @property
    def kernel(self) -> str:
        return "products" if self.bias is None and self.magnitude is None else "scaled products"

    def as_product(self, base: nn.Module) -> Product:
        shift = None if self.bias is None else self.bias.detach().float() * self.scale
        if self.magnitude is None:
            return Product(self.a, self.b, self.scale, None, shift)
        factor = self.factor(base).float()
        own = self._own_bias(base)
        shift = None if own is None else own.detach().float() * (1 - factor)
        return Product(self.a, self.b, self.scale, factor, shift)

    @property
    def divides(self) -> bool:
        return True

    def mapped(self, change: Change) -> LowRank:
        a, b = change(self.a), change(self.b)
        more = [None if each is None else change(each) for each in (self.bias, self.magnitude, self.norm)]
        return LowRank(a, b, self.scale, *more)

    def padded(self) -> LowRank:
        return replace(self, a=_padded_rows(self.a), b=_padded_rows(self.b.T).T.contiguous(), _factor=None)

    def given(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.a.dtype)

    def apply(self, base: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = self.a.to(x.device), self.b.to(x.device)  # of layers on several devices, all lie on one
        bias = None if self.bias is None else self.bias.to(x.device)
        product = linear(linear(x.to(a.dtype), a), b, bias)
        if self.magnitude is None:
            return y + product * self.scale
        factor = self.factor(base).to(y.device)
        own = self._own_bias(base)
        plain = y if own is None else y - own
        return y + ((factor - 1) * plain + factor * product * self.scale)

    def _own_bias(self, base: nn.Module) -> torch.Tensor | None:
        """The layer's own bias, as far as y has it."""
        found: torch.Tensor | None = None if self.norm is not None else local_part(base.bias)
        return found

    def factor(self, base: nn.Module) -> torch.Tensor:
        """[outputs]: magnitude / norm, computed once. Who changes a weight makes the part anew."""
        if self._factor is None:
            assert self.magnitude is not None
            norm = self.norms(base) if self.norm is None else self.norm
            self._factor = self.magnitude.detach().to(norm.device) / norm
        return self._factor

    def norms(self, base: nn.Module) -> torch.Tensor:
        """[outputs]: the norms of columns of weights, of the part of them that is here."""
        weight = local_part(weight_of(base)).detach()
        weight = weight.T if isinstance(base, Conv1D) else weight
        return _norms(weight, self.a.detach(), self.b.detach(), self.scale)


@dataclass(eq=False)
class LowRankEmbedding(Part):
    """An addition to an embedding's output: scale * (a^T[ids]) b^T, by DoRA's magnitude as for a layer."""

    name: ClassVar[str] = "LoRA on embeddings"
    a: torch.Tensor
    """[rank, ids]"""
    b: torch.Tensor
    """[width, rank]"""
    scale: float
    magnitude: torch.Tensor | None = None
    """[width]"""
    _factor: torch.Tensor | None = field(default=None, repr=False)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    @property
    def settings(self) -> Hashable:
        return "embedding", self.scale, self.a.shape, self.magnitude is None

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def reads_base(self) -> bool:
        return self.magnitude is not None

    def mapped(self, change: Change) -> LowRankEmbedding:
        a, b = change(self.a), change(self.b)
        magnitude = None if self.magnitude is None else change(self.magnitude)
        return LowRankEmbedding(a, b, self.scale, magnitude)

    @property
    def stays_whole(self) -> bool:
        return self.magnitude is None

    def padded(self) -> LowRankEmbedding:
        return replace(self, a=_padded_rows(self.a), b=_padded_rows(self.b.T).T.contiguous(), _factor=None)

    @property
    def kernel(self) -> str:
        return "products" if self.magnitude is None else "scaled products"

    def as_product(self, base: nn.Module) -> Product:
        scale = self.scale * _embed_scale(base)
        return Product(self.a, self.b, scale, None if self.magnitude is None else self.factor(base).float())

    def apply(self, base: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = self.a.to(x.device), self.b.to(x.device)
        product = nn.functional.embedding(x, a.T) @ b.T
        if self.magnitude is None:
            return y + _embed_scaled(base, product * self.scale)
        factor = self.factor(base).to(y.device)
        return factor * y + _embed_scaled(base, factor * product * self.scale)

    def factor(self, base: nn.Module) -> torch.Tensor:
        """[width]: magnitude / norm, computed once."""
        if self._factor is None:
            assert self.magnitude is not None
            weight = weight_of(base).detach().T
            norm = _norms(weight, self.a.detach(), self.b.detach(), self.scale)
            self._factor = self.magnitude.detach().to(norm.device) / norm
        return self._factor


@dataclass(frozen=True, eq=False)
class OwnBias(Part):
    """A bias in the place of a module's own."""

    name: ClassVar[str] = "a bias"
    bias: torch.Tensor
    here: bool = True
    """False if another rank adds it, to the sum of all parts of an output."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.bias,)

    @property
    def settings(self) -> Hashable:
        return "bias"

    @property
    def reads_base(self) -> bool:
        return True

    @property
    def kernel(self) -> str:
        return "shift"

    @property
    def divides(self) -> bool:
        return True

    def as_shift(self, base: nn.Module) -> torch.Tensor:
        own: Any = local_part(base.bias)
        found: torch.Tensor = self.bias.detach().float() - own.detach().float()
        return found if self.here else torch.zeros_like(found)

    def mapped(self, change: Change) -> OwnBias:
        return OwnBias(change(self.bias), self.here)

    def apply(self, base: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not self.here:
            return y
        own: Any = local_part(base.bias)
        found: torch.Tensor = y + (self.bias.to(y.device) - own)
        return found


@dataclass(frozen=True, eq=False)
class TrainedTokens(Part):
    """Rows of an embedding in the place of its own; of a tied head, too."""

    name: ClassVar[str] = "trained tokens"
    ids: tuple[int, ...]
    rows: torch.Tensor
    """[len(ids), width]"""
    _index: list[torch.Tensor] = field(default_factory=list, repr=False)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.rows,)

    @property
    def settings(self) -> Hashable:
        return "tokens", self.ids

    @property
    def alone(self) -> bool:
        return True

    @property
    def stays_whole(self) -> bool:
        return True

    def mapped(self, change: Change) -> TrainedTokens:
        return replace(self, rows=change(self.rows), _index=[])

    @property
    def kernel(self) -> str:
        return "rows"

    def as_rows(self, base: nn.Module) -> Rows:
        rows = self.rows.to(weight_of(base).dtype)
        return Rows(rows, self.index(rows.device), None, _embed_scale(base))

    def index(self, device: torch.device) -> torch.Tensor:
        """The ids on a device."""
        if not self._index or self._index[0].device != device:
            self._index[:] = [torch.tensor(self.ids, dtype=torch.long, device=device)]
        return self._index[0]

    def vocabulary(self, known: int) -> int:
        return max(known, max(self.ids) + 1)

    def apply(self, base: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = self.rows.to(device=x.device, dtype=weight_of(base).dtype)
        index = self.index(x.device)
        if not isinstance(base, nn.Embedding):
            more = self.vocabulary(y.shape[-1]) - y.shape[-1]
            return nn.functional.pad(y, (0, more)).index_copy(-1, index, linear(x, rows))
        found = x[..., None] == index
        own = rows[found.to(torch.int8).argmax(-1)]
        return torch.where(found.any(-1)[..., None], _embed_scaled(base, own), y)


@dataclass(frozen=True, eq=False)
class SavedModule(Part):
    """A whole module in the place of the model's own."""

    name: ClassVar[str] = "modules_to_save"
    module: nn.Module

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self.module.parameters(), *self.module.buffers())

    @property
    def settings(self) -> Hashable:
        return "module", type(self.module).__name__, tuple([each.shape for each in self.tensors])

    @property
    def alone(self) -> bool:
        return True

    @property
    def kernel(self) -> str:
        return "rows" if isinstance(self.module, (nn.Linear, nn.Embedding)) else ""

    @property
    def stays_whole(self) -> bool:
        return True

    def vocabulary(self, known: int) -> int:
        own: Any = self.module
        return len(own.weight) if isinstance(own, (nn.Linear, nn.Embedding)) else known

    def base_behind(self, base: nn.Module) -> nn.Module:
        return self.module

    def as_rows(self, base: nn.Module) -> Rows:
        own: Any = self.module
        bias = getattr(own, "bias", None)
        return Rows(own.weight, None, None if bias is None else bias.detach().float(), _embed_scale(own))

    def mapped(self, change: Change) -> SavedModule:
        return SavedModule(with_tensors(self.module, [change(each) for each in self.tensors]))

    def apply(self, base: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.module(x)
        return found


def _padded_rows(weight: torch.Tensor) -> torch.Tensor:
    """A weight with rows of zeros up to a multiple of 8."""
    return nn.functional.pad(weight.detach(), (0, 0, 0, -len(weight) % 8)).contiguous()


def with_tensors(module: nn.Module, tensors: Sequence[torch.Tensor]) -> nn.Module:
    """A copy of a module, without hooks, with these in the place of its parameters and buffers."""
    own = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {
        id(old): nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
        for old, new in zip(own, tensors, strict=True)
    }
    for each in module.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            memo[id(each.__dict__[name])] = type(each.__dict__[name])()
        for name in ("forward", "_hf_hook", "_old_forward"):
            if name in each.__dict__:
                memo[id(each.__dict__[name])] = None
    made = copy.deepcopy(module, memo)
    for each in made.modules():
        for name in ("forward", "_hf_hook", "_old_forward"):
            each.__dict__.pop(name, None)
    return made


def weight_of(base: nn.Module) -> torch.Tensor:
    """A module's weight, dequantized if it is quantized."""
    integrations: Any = sys.modules.get("peft.utils.integrations")
    own: Any = base
    found: torch.Tensor = own.weight if integrations is None else integrations.dequantize_module_weight(own)
    return found


def _embed_scale(base: nn.Module) -> float:
    """The factor by which a module multiplies the rows of its weight."""
    scale: Any = getattr(base, "embed_scale", 1.0)
    if isinstance(scale, torch.Tensor):
        scale = scale.item() if scale.numel() == 1 else 1.0
    return float(torch.tensor(scale, dtype=weight_of(base).dtype, device="cpu"))


def _embed_scaled(base: nn.Module, found: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding, multiplied as the module multiplies its own."""
    scale: Any = getattr(base, "embed_scale", None)
    if isinstance(scale, (int, float)):
        scale = torch.tensor(scale, device=found.device, dtype=weight_of(base).dtype)
    if scale is None or scale.numel() != 1:
        return found
    scaled: torch.Tensor = found * scale.to(found.dtype)
    return scaled


def _norms(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """The norm of each row of weight + scale * b a, some rows at a time."""
    found = []
    for begin in range(0, len(weight), NORM_ROWS):
        rows = slice(begin, begin + NORM_ROWS)
        product = b[rows].to(a.device) @ a
        own = weight[rows].to(device=a.device, dtype=a.dtype)
        found.append(torch.linalg.norm(own + scale * product, dim=1).to(a.dtype))
    return torch.cat(found)


def by_kernels(parts: Sequence[Part]) -> bool:
    """True if kernels compute a module's parts together."""
    kinds = [part.kernel for part in parts]
    if all(kind == "products" for kind in kinds):
        return True
    first, *others = kinds
    return (first == "rows" and not others) or (
        first in ("products", "scaled products") and all(kind == "shift" for kind in others)
    )


def merged(parts: Sequence[Part], base: nn.Module) -> Product:
    """A module's products and shifts as one, up to rounding: the same memory if there is only one."""
    products = [found for part in parts if (found := part.as_product(base)) is not None]
    first = products[0]
    shifts = [first.shift, *[part.as_shift(base) for part in parts]]
    added = [shift for shift in shifts if shift is not None]
    if added:
        first = first._replace(shift=reduce(torch.add, added))
    if len(products) == 1:
        return first
    dtype = reduce(torch.promote_types, [each.a.dtype for each in products])
    a = torch.cat([each.a.detach().to(dtype) for each in products])
    b = torch.cat([each.b.detach().to(dtype) * each.scale for each in products], dim=1)
    return Product(a, b, 1.0)
