"""The adapters of a peft model in a table by slot."""

from __future__ import annotations

from typing import Any

import torch
from kernel_cases import DEVICE, load

from hf_paged.model.adapters import AdapterTable
from hf_paged.model.adapters.joint import note_places
from hf_paged.model.snapshot import ModelSnapshot

kernels = load()


def snapshot(model: Any) -> ModelSnapshot:
    """Reads all of a model that its captured steps depend on."""
    return ModelSnapshot(model.get_base_model(), watch=True)


def table_of(model: Any, names: list[str], by_kernels: bool) -> tuple[AdapterTable, list[Any]]:
    """A table with adapters in the first slots, and the layers that they change."""
    lora_layers = snapshot(model).lora
    note_places(model.get_base_model())
    table = AdapterTable(len(names) + 1, torch.device(DEVICE), kernels if by_kernels else None)
    for slot, name in enumerate(names):
        table.put(slot, lora_layers.read(name))
    return table, lora_layers.layers
