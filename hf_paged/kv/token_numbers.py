"""Numbers that each token has beside its keys and values: int16, in the blocks of its table.

They are one more store of a group of layers. So what is done with blocks takes them along: forks, copies,
swaps, hits of a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import state_steps
from .batch import Batch
from .group import LayerGroup
from .layout import StateLayout
from .upload import upload


def write_numbers(group: LayerGroup, name: str, batch: Batch, numbers: torch.Tensor) -> None:
    """Put the numbers [tokens, ...] of a step's tokens into their slots; those of padding are dropped."""
    own = numbers.shape[1:]
    # Nothing computes with them: the type is one that kernels know, as all stores of a group are asked for.
    layout = StateLayout(numbers.device, torch.int16, (group.pool.block_size, *own), torch.float32)
    if group.layout(name) != layout:
        group.place(name, layout)
    store, place = group.store(name)
    slots = store.of_layer[place].flatten(0, 1)
    state_steps.write(slots, batch.targets(numbers.device), numbers.to(torch.int16))


def read_numbers(group: LayerGroup, name: str, blocks: Sequence[int], tokens: int) -> torch.Tensor:
    """The numbers [tokens, ...] of the first tokens of a table of these blocks, on the host."""
    store, place = group.store(name)
    held = upload(list(blocks[: group.pool.blocks_for(tokens)]), store.layout.device)
    found: torch.Tensor = store.of_layer[place].index_select(0, held)
    return found.flatten(0, 1)[:tokens].cpu()
