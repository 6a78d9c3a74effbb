"""Keys and values of the layers of one group: one allocation, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..blocks.table import Copy
from .batch import Batch, StridedView
from .layout import Layout
from .ops import choose
from .ops_torch import Ops, Pages
from .ordinary import ordinary_tensors
from .reference import invariant
from .upload import upload

TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 2**-6, torch.bfloat16: 2**-4}
"""How far numbers may lie apart, relative to the largest, that were computed twice in batches of different
shapes.
"""


class Store:
    """Keys and values of `layers` layers of one layout: `blocks` blocks, one allocation (contract C5).

    Slot s belongs to block s // block_size. Layers are consecutive, all keys before all values.
    """

    def __init__(
        self, layout: Layout, layers: int, blocks: int, block_size: int, kernels: str = "auto"
    ) -> None:
        self.layout = layout
        self.layers = layers
        self.block_size = block_size
        self.ops = choose(kernels, layout, captured=False)
        self.captured = choose(kernels, layout, captured=True)
        """The ops of captured steps."""
        self._hold(*self._allocate(blocks))

    def _hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values
        self.of_layer = list(zip(keys.unbind(), values.unbind(), strict=True))
        """Keys [slots, heads, key_dim] and values [slots, heads, value_dim] of each layer."""
        self._parts: tuple[torch.Tensor, ...] = (keys, values)
        if keys.shape == values.shape:
            # They lie side by side: one view of all costs half as much as two.
            both = keys.as_strided((2 * self.layers, *keys.shape[1:]), keys.stride())
            self._parts = (both,)
        self._views: dict[tuple[object, int], tuple[torch.Tensor, ...]] = {}

    @property
    def by_block(self) -> list[torch.Tensor]:
        """Keys [layers, blocks, elements] and values."""
        return [
            data.view(self.layers, self.blocks, self.block_size * data[0, 0].numel())
            for data in (self.keys, self.values)
        ]

    def pages(self, place: int, batch: Batch, captured: bool = False) -> Pages:
        """The input of attention in the layer at `place` in a step."""
        keys, values = self.of_layer[place]
        # One launch for a whole flat row is worth its price in every step, captured or not.
        if batch.packed:
            captured = self.captured.kernels is not None
        # So is a launch in an order that no batch changes.
        captured = captured or (keys.is_cuda and invariant.get())
        return Pages(keys, values, batch, self.captured if captured else self.ops, self, place)

    def views(
        self, place: int, strided: StridedView, batch: Batch, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, heads, columns - first, dim] of the layer at `place`, where rows lie at one
        distance from each other. A step's views are made for all layers together.
        """
        key = (batch.step, first)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 1:
                self._views.clear()
            found = ()
            for part in self._parts:
                found += strided.view(part, batch.rows, first, batch.columns).unbind()
            self._views[key] = found
        return found[place], found[self.layers + place]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values

    def take_layers(self, old: Store) -> None:
        """Take over the content of a store of fewer layers."""
        self.keys[: old.layers] = old.keys
        self.values[: old.layers] = old.values

    @property
    def blocks(self) -> int:
        return self.keys.shape[1] // self.block_size

    @property
    def bytes(self) -> int:
        return self.layers * self.blocks * self.block_size * self.layout.token_bytes

    def _allocate(self, blocks: int, on: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One buffer, seen as keys [layers, slots, heads, key_dim] and values [layers, slots, heads,
        value_dim].
        """
        device, dtype, heads, key_dim, value_dim = self.layout
        slots = blocks * self.block_size
        border = self.layers * slots * heads * key_dim
        buffer = allocate(self.layers * slots * heads * (key_dim + value_dim), dtype, on or device)
        keys = buffer[:border].view(self.layers, slots, heads, key_dim)
        values = buffer[border:].view(self.layers, slots, heads, value_dim)
        return keys, values

    def grow(self, blocks: int) -> None:
        """Move to a larger allocation; every slot keeps its number and content."""
        self._move(self.keys, self.values, blocks)

    def grow_by_host(self, blocks: int) -> None:
        """The same where both allocations do not fit beside each other: what is there waits on the host."""
        before = self.blocks
        keys, values = self._allocate(before, torch.device("cpu"))
        keys.copy_(self.keys)
        values.copy_(self.values)
        self._hold(keys, values)  # a step that reads them here fails, instead of answering wrongly
        try:
            self._move(keys, values, blocks)
        except BaseException:
            self._move(keys, values, before)
            raise

    def _move(self, keys: torch.Tensor, values: torch.Tensor, blocks: int) -> None:
        slots = keys.shape[1]
        new_keys, new_values = self._allocate(blocks)
        new_keys[:, :slots] = keys
        new_values[:, :slots] = values
        self._hold(new_keys, new_values)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Carry out the copies on write of a step, all layers together (C15)."""
        sources, targets = upload(list(zip(*copies, strict=True)), self.layout.device)
        self._copy(self.ops, sources, targets)

    def copy_pairs(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """The same for a captured step, whose copies were uploaded with it: blocks [copies] to read, blocks
        [copies] to write.
        """
        self._copy(self.captured, sources, targets)

    def blocks_agree(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """True if the blocks of every pair hold the same, up to rounding."""
        one, other = upload(list(zip(*pairs, strict=True)), self.layout.device)
        layers = [data.view(self.blocks, -1) for pair in self.of_layer for data in pair]
        return all(tensors_agree(blocks[one], blocks[other]) for blocks in layers)

    def _copy(self, ops: Ops, sources: torch.Tensor, targets: torch.Tensor) -> None:
        ops.copy(
            [data.view(self.layers, self.blocks, -1) for data in (self.keys, self.values)], sources, targets
        )


def tensors_agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors that were computed in two ways hold the same, up to rounding."""
    furthest = (one.double() - other.double()).abs().amax()
    return bool(furthest <= TOLERANCES.get(one.dtype, 0.0) * other.double().abs().amax())


def allocate(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # What lives on must be writable outside inference mode too, wherever it was allocated.
    with ordinary_tensors():
        return torch.empty(elements, dtype=dtype, device=device)
