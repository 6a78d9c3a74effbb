"""The adapters that a device holds: slots, and the tables by which kernels find the weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn

from ..lora import Adapter, Part
from ..parts import Product, Rows, by_kernels, merged
from ..peft_parts import base_of, takes_products
from ..weights_digest import address_of
from .joint import in_order, joint_layers
from .vocabulary import Vocabularies

SMALLEST_RANK = 16
_layouts = itertools.count(1)


Chosen = Mapping[nn.Module, tuple[Part, ...]]
"""Some of an adapter's parts, by module."""


class _Split(NamedTuple):
    """The parts of an adapter by what computes them."""

    products: Chosen
    rows: Chosen
    in_torch: Chosen

    @property
    def scaled(self) -> bool:
        """True if outputs of products are scaled or shifted."""
        return any(part.kernel != "products" for parts in self.products.values() for part in parts)


class AdapterTable:
    """Adapters by slot. A token's slot chooses what is added to it; -1 adds nothing.

    Kernels read weights where they lie, so that an adapter that is trained in place is served as it is.
    Weights of another number type than the largest, of a rank that is no multiple of 8, or unaligned are
    copied first, by `put`, and so are those of several adapters together. Without kernels, on a CPU or in
    batch_invariant(), torch computes with the weights themselves, each in its own number type.
    """

    def __init__(
        self,
        slots: int,
        device: torch.device,
        kernels: Any = None,
        vocabularies: Vocabularies | None = None,
    ) -> None:
        self.slots: list[Adapter | None] = [None] * slots
        self.vocabularies = Vocabularies() if vocabularies is None else vocabularies
        """Those of all adapters that may come."""
        self.sizes: torch.Tensor | None = None
        """[1 + slots]: how many tokens the model has scores for, and the adapter of each slot; None if all
        have the model's vocabulary.
        """
        self.device = device
        self.kernels = kernels
        """The package of kernels; None for plain torch."""
        self.layers: dict[nn.Module, int] = {}
        """The layers that adapters may add products to, numbered: those with one input stand side by side."""
        self.weights: Any = None
        """The tables of all layers; others as soon as an adapter comes that they have no room for."""
        self.replaced: dict[nn.Module, int] = {}
        """The modules of whose weights adapters replace rows, numbered."""
        self.rows: Any = None
        """The tables of these."""
        self.layout = 0
        """The number of these tables, which no other tables have had: captured steps name them."""
        self.why_not: str | None = None
        """Why a batch cannot have several adapters, once a forward has shown it."""
        self.groups: dict[int, int] = {}
        """How many layers with the same input begin with a layer, as far as a forward has shown it."""
        self.joint: dict[int, int] = {}
        """For a layer the last one of those whose outputs are read together with its own."""
        self.in_torch: list[Chosen] = [{} for _ in range(slots)]
        """By slot the parts of its adapter that plain torch computes."""
        self._memory: list[list[torch.UntypedStorage]] = [[] for _ in range(slots)]
        """Named memory: a parameter may be given other memory while kernels still read this."""
        self._copied = [0] * slots
        """Bytes of each slot's weights that kernels read copies of."""

    def lay_out(self, layers: Iterable[nn.Module], expected: Iterable[Adapter] = ()) -> None:
        """Number layers in this order, before any adapter is there. expected: those that may come, for which
        the tables need not become larger later.
        """
        ordered = in_order({**self.layers, **dict.fromkeys(filter(takes_products, layers))})
        if len(ordered) != len(self.layers):
            self.layers = {module: i for i, module in enumerate(ordered)}
            self.weights = None
        if self.kernels is not None:
            for adapter in expected:
                self._make_room(adapter)

    def renew_vocabularies(self) -> None:
        """Follow the vocabularies of the adapters that may come, which are others than before."""
        self.renew_layout()
        self.sizes = None
        if self.vocabularies.by_name:
            own = self.vocabularies.own
            sizes = [own if held is None else self.vocabularies.of(held) for held in (None, *self.slots)]
            self.sizes = torch.tensor(sizes, device=self.device)

    def cut(self, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Logits [rows, tokens], written to: minus infinity for tokens that the adapter of a row, in the slot
        index [rows], does not know.
        """
        if self.sizes is not None:
            least = self.vocabularies.least
            tokens = torch.arange(least, logits.shape[-1], device=logits.device)
            sizes = self.sizes[index + 1].to(logits.device)
            logits[:, least:].masked_fill_(tokens >= sizes[:, None], -torch.inf)
        return logits

    def renew_layout(self) -> None:
        """Give the tables, if there are any, another number: captured steps of the old one stay unused."""
        if self.layout:
            self.layout = next(_layouts)

    def put(self, slot: int, adapter: Adapter) -> None:
        """Let a slot hold an adapter, whose weights are on the device."""
        self.slots[slot] = adapter
        self.in_torch[slot] = self._split(adapter).in_torch
        if self.sizes is not None:
            self.sizes[slot + 1] = self.vocabularies.of(adapter)
        if self.kernels is not None:
            self._make_room(adapter)
            self._enter(slot)
            self._upload()
        else:
            self.layout = self.layout or next(_layouts)

    def _upload(self) -> None:
        for each in filter(None, (self.weights, self.rows)):
            each.upload()

    def _split(self, adapter: Adapter) -> _Split:
        split = _Split({}, {}, {})
        for module, parts in adapter.layers.items():
            served = self.kernels is not None and by_kernels(parts)
            by_rows = served and parts[0].kernel == "rows"
            chosen: Any = split.rows if by_rows else split.products if served else split.in_torch
            chosen[module] = parts
        return split

    @property
    def why_eager(self) -> str | None:
        """Why steps cannot be captured now: an adapter has parts that no kernel computes."""
        found = (part for held in self.in_torch for parts in held.values() for part in parts)
        first = next(found, None)
        return None if first is None or self.kernels is None else f"no kernel computes {first.name}"

    def has_copies(self, slot: int) -> bool:
        """True if kernels read copies of an adapter's weights, which `put` makes anew."""
        return self._copied[slot] > 0

    def clear(self, slot: int) -> None:
        """Let a slot hold nothing."""
        self.slots[slot] = None
        self.in_torch[slot] = {}
        self._memory[slot] = []
        self._copied[slot] = 0
        for each in filter(None, (self.weights, self.rows)):
            each.clear(slot)
        self._upload()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tables, which kernels read in every launch."""
        tables = [tensor for each in (self.weights, self.rows) if each is not None for tensor in each.tensors]
        return tables if self.sizes is None else [*tables, self.sizes]

    @property
    def bytes(self) -> int:
        """Memory of the tables and of copied weights."""
        return sum(tensor.nbytes for tensor in self.tensors) + sum(self._copied)

    def _make_room(self, adapter: Adapter) -> None:
        """Make larger tables if an adapter changes other modules, or has a larger rank or type."""
        splits = [self._split(each) for each in (adapter, *filter(None, self.slots))]
        made = [self._room_for_products(splits), self._room_for_rows(splits)]
        if not any(made):
            return
        self.layout = next(_layouts)
        for slot, held in enumerate(self.slots):
            if held is not None:
                self._enter(slot)

    def _room_for_products(self, splits: Sequence[_Split]) -> bool:
        """Make tables of products if these have no room for all of them."""
        known = self.weights
        needed = [Adapter(split.products) for split in (splits if known is None else splits[:1])]
        types = {part.tensors[0].dtype for each in needed for part in each.parts}
        types |= set() if known is None else {known.dtype}
        dtype = reduce(torch.promote_types, types) if types else torch.float32
        least = SMALLEST_RANK if known is None else known.rank
        rank = max([least, *[1 << (each.rank - 1).bit_length() for each in needed if each.rank]])
        scaled = any(split.scaled for split in splits) or (known is not None and known.scaled)
        same = known is not None and (dtype, rank, scaled) == (known.dtype, known.rank, known.scaled)
        layers = {module for each in needed for module in each.layers}
        if same and layers <= self.layers.keys():
            return False
        ordered = in_order({**self.layers, **dict.fromkeys(layers)})
        self.layers = {module: i for i, module in enumerate(ordered)}
        self.groups = {}
        self.joint = joint_layers(self.layers)
        counts = len(self.layers), len(self.slots)
        self.weights = self.kernels.LoraWeights(*counts, rank, dtype, self.device, scaled=scaled)
        return True

    def _room_for_rows(self, splits: Sequence[_Split]) -> bool:
        """Make tables of rows if these have no room for all of them."""
        modules = {module: None for split in splits for module in split.rows}
        known = self.rows
        if not modules:
            return False
        found = [self._rows_of(*item) for split in splits for item in split.rows.items()]
        types = [each.rows.dtype for each in found] + ([] if known is None else [known.dtype])
        dtype = reduce(torch.promote_types, types)
        if known is not None and modules.keys() <= self.replaced.keys() and dtype == known.dtype:
            return False
        self.replaced = {module: i for i, module in enumerate({**self.replaced, **modules})}
        self.rows = self.kernels.SlotRows(len(self.replaced), len(self.slots), dtype, self.device)
        return True

    def _rows_of(self, module: nn.Module, parts: tuple[Part, ...]) -> Rows:
        found = parts[0].as_rows(base_of(module))
        assert found is not None
        return found

    def _enter(self, slot: int) -> None:
        held = self.slots[slot]
        assert held is not None
        split = self._split(held)
        used: list[torch.Tensor | None] = []
        self.weights.clear(slot)
        for module, parts in split.products.items():
            product = self._readable(merged(parts, base_of(module)))
            self.weights.put(self.layers[module], slot, *product)
            used += [product.a, product.b, product.factor, product.shift]
        if self.rows is not None:
            self.rows.clear(slot)
        for module, parts in split.rows.items():
            rows = self._readable_rows(self._rows_of(module, parts))
            self.rows.put(self.replaced[module], slot, *rows)
            used += [rows.rows, rows.bias, rows.ids]
        read = [each for each in used if each is not None]
        own = set(map(address_of, held.tensors))
        self._memory[slot] = [each.untyped_storage() for each in read]
        copies = [each for each in read if each.is_floating_point()]
        self._copied[slot] = sum(each.nbytes for each in copies if address_of(each) not in own)

    def _readable_rows(self, found: Rows) -> Rows:
        """Rows as kernels can read them: the same memory if possible."""
        rows = found.rows.detach().to(self.rows.dtype).contiguous()
        return found._replace(rows=rows.clone() if rows.data_ptr() % 16 else rows)

    def _readable(self, part: Product) -> Product:
        """A layer's weights as kernels can read them: the same memory if possible."""
        a = part.a.detach()
        b = part.b.detach()
        rank = a.shape[0]
        dtype = self.weights.dtype
        if a.dtype == b.dtype == dtype and self.kernels.fits(a, rank) and self.kernels.fits(b, rank):
            return part
        padded = -(-rank // 8) * 8
        wide_a = a.new_zeros(padded, a.shape[1], dtype=dtype)
        wide_b = b.new_zeros(b.shape[0], padded, dtype=dtype)
        wide_a[:rank] = a
        wide_b[:, :rank] = b
        return part._replace(a=wide_a, b=wide_b)
