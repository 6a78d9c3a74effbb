"""The adapters that a device holds: slots, and the tables by which kernels find the weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import nn

from ..lora import Adapter, Part
from ..parts import LowRank, merged
from ..peft_parts import takes_products
from .joint import in_order, joint_layers

SMALLEST_RANK = 16
_layouts = itertools.count(1)


class AdapterTable:
    """Adapters by slot. A token's slot chooses what is added to it; -1 adds nothing.

    Kernels read weights where they lie, so that an adapter that is trained in place is served as it is.
    Weights of another number type than the largest, of a rank that is no multiple of 8, or unaligned are
    copied first, by `put`, and so are those of several adapters together. Without kernels, on a CPU or in
    batch_invariant(), torch computes with the weights themselves, each in its own number type.
    """

    def __init__(self, slots: int, device: torch.device, kernels: Any = None) -> None:
        self.slots: list[Adapter | None] = [None] * slots
        self.device = device
        self.kernels = kernels
        """The package of kernels; None for plain torch."""
        self.layers: dict[nn.Module, int] = {}
        """The layers that adapters may add products to, numbered: those with one input stand side by side."""
        self.weights: Any = None
        """The tables of all layers; others as soon as an adapter comes that they have no room for."""
        self.layout = 0
        """The number of these tables, which no other tables have had: captured steps name them."""
        self.why_not: str | None = None
        """Why a batch cannot have several adapters, once a forward has shown it."""
        self.groups: dict[int, int] = {}
        """How many layers with the same input begin with a layer, as far as a forward has shown it."""
        self.joint: dict[int, int] = {}
        """For a layer the last one of those whose outputs are read together with its own."""
        self.in_torch: list[Mapping[nn.Module, tuple[Part, ...]]] = [{} for _ in range(slots)]
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

    def renew_layout(self) -> None:
        """Give the tables, if there are any, another number: captured steps of the old one stay unused."""
        if self.layout:
            self.layout = next(_layouts)

    def put(self, slot: int, adapter: Adapter) -> None:
        """Let a slot hold an adapter, whose weights are on the device."""
        self.slots[slot] = adapter
        self.in_torch[slot] = self._split(adapter)[1]
        if self.kernels is not None:
            self._make_room(adapter)
            self._enter(slot)
            self.weights.upload()
        else:
            self.layout = self.layout or next(_layouts)

    def _split(self, adapter: Adapter) -> tuple[dict[nn.Module, Any], dict[nn.Module, tuple[Part, ...]]]:
        """The parts of an adapter that kernels compute, and those that plain torch does, by module."""
        kernels: dict[nn.Module, Any] = {}
        others: dict[nn.Module, tuple[Part, ...]] = {}
        for module, parts in adapter.layers.items():
            by_kernels = self.kernels is not None and all(part.by_kernels for part in parts)
            (kernels if by_kernels else others)[module] = parts
        return kernels, others

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
        if self.weights is not None:
            self.weights.clear(slot)
            self.weights.upload()

    @property
    def bytes(self) -> int:
        """Memory of the tables and of copied weights."""
        if self.weights is None:
            return 0
        tables: list[torch.Tensor] = self.weights.tensors
        return sum(tensor.nbytes for tensor in tables) + sum(self._copied)

    def _make_room(self, adapter: Adapter) -> None:
        """Make larger tables if an adapter changes other layers, or has a larger rank or type."""
        known = self.weights
        needed = [adapter] if known is not None else [adapter, *filter(None, self.slots)]
        needed = [Adapter(self._split(each)[0]) for each in needed]
        adapter = needed[0]
        types = {tensor.dtype for each in needed for tensor in each.tensors}
        types |= set() if known is None else {known.dtype}
        dtype = reduce(torch.promote_types, types) if types else torch.float32
        least = SMALLEST_RANK if known is None else known.rank
        rank = max([least, *[1 << (each.rank - 1).bit_length() for each in needed if each.rank]])
        same = known is not None and (dtype, rank) == (known.dtype, known.rank)
        if same and adapter.layers.keys() <= self.layers.keys():
            return
        layers = in_order({**self.layers, **adapter.layers})
        self.layers = {module: i for i, module in enumerate(layers)}
        self.groups = {}
        self.joint = joint_layers(self.layers)
        self.layout = next(_layouts)
        self.weights = self.kernels.LoraWeights(len(self.layers), len(self.slots), rank, dtype, self.device)
        for slot, held in enumerate(self.slots):
            if held is not None:
                self._enter(slot)

    def _enter(self, slot: int) -> None:
        held = self.slots[slot]
        assert held is not None
        read, _ = self._split(held)
        served = {module: self._readable(parts) for module, parts in read.items()}
        self.weights.clear(slot)
        for module, part in served.items():
            self.weights.put(self.layers[module], slot, part.a, part.b, part.scale)
        self._memory[slot] = [each.untyped_storage() for part in served.values() for each in (part.a, part.b)]
        copies = [part for module, part in served.items() if part is not read[module][0]]
        self._copied[slot] = sum(part.a.nbytes + part.b.nbytes for part in copies)

    def _readable(self, parts: tuple[LowRank, ...]) -> LowRank:
        """A layer's weights as kernels can read them: the same memory if possible."""
        part = merged(parts)
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
        return LowRank(wide_a, wide_b, part.scale)
