"""Recurrent states of the layers of one group: an allocation for each shape, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..blocks.table import Copy
from . import state_steps
from .layout import StateLayout
from .ops import choose_for
from .reference import invariant
from .store import allocate, tensors_agree
from .upload import upload


class StateStore:
    """`layers` states of one layout, each in `blocks` slots, and one slot more: rows that a captured step has
    beyond the call's write there.
    """

    def __init__(self, layout: StateLayout, layers: int, blocks: int, kernels: str = "auto") -> None:
        self.layout = layout
        self.layers = layers
        self.captured = choose_for(kernels, layout.device, layout.computed)
        """The ops of captured steps."""
        self._hold(self._allocate(blocks))

    def _hold(self, data: torch.Tensor) -> None:
        self.data = data
        self.of_layer = list(data.unbind())
        """The states [slots + 1, ...] of each layer."""

    @property
    def blocks(self) -> int:
        return self.data.shape[1] - 1

    @property
    def bytes(self) -> int:
        return self.data.nbytes

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.data,)

    @property
    def by_block(self) -> list[torch.Tensor]:
        """The states [layers, slots, elements]."""
        return [self.data.flatten(2)] if self.data.ndim > 3 else [self.data]

    def _allocate(self, blocks: int, on: torch.device | None = None) -> torch.Tensor:
        device, dtype, shape, _ = self.layout
        each = torch.Size(shape).numel()
        flat = allocate(self.layers * (blocks + 1) * each, dtype, on or device)
        return flat.view(self.layers, blocks + 1, *shape)

    def grow(self, blocks: int) -> None:
        """Move to a larger allocation; every slot keeps its number and content."""
        self._move(self.data, blocks)

    def grow_by_host(self, blocks: int) -> None:
        """The same where both allocations do not fit beside each other: what is there waits on the host."""
        before = self.blocks
        waiting = self.data.cpu()
        self._hold(waiting)  # a step that reads them here fails, instead of answering wrongly
        try:
            self._move(waiting, blocks)
        except BaseException:
            self._move(waiting, before)
            raise

    def _move(self, data: torch.Tensor, blocks: int) -> None:
        moved = self._allocate(blocks)
        moved[:, : data.shape[1] - 1] = data[:, :-1]
        self._hold(moved)

    def take_layers(self, old: StateStore) -> None:
        """Take over the content of a store of fewer layers."""
        self.data[: old.layers, :-1] = old.data[:, :-1]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy slots, in all layers together."""
        sources, targets = upload(list(zip(*copies, strict=True)), self.layout.device)
        self.copy_pairs(sources, targets)

    def copy_pairs(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """The same by slots [copies] to read and slots [copies] to write."""
        self.data.index_copy_(1, targets.long(), self.data.index_select(1, sources))

    def blocks_agree(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """True if the slots of every pair hold the same, up to rounding."""
        one, other = upload(list(zip(*pairs, strict=True)), self.layout.device)
        return all(tensors_agree(states[one], states[other]) for states in self.of_layer)

    # ---- a step

    @property
    def steps(self) -> Any:
        """The kernels that step states of a captured step in their slots; None where there are none."""
        return None if invariant.get() else self.captured.kernels

    def read(self, place: int, slots: torch.Tensor) -> torch.Tensor:
        """The states [rows, ...] of the layer at `place` in slots [rows]; behind -1 is no state, and the
        answer means nothing.
        """
        return self.of_layer[place].index_select(0, slots.clamp(min=0)).to(self.layout.computed)

    def write(self, place: int, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Put states [rows, ...] of the layer at `place` into slots [rows]; those of -1 are dropped."""
        state_steps.write(self.of_layer[place], slots, states)
