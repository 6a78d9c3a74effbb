"""The adapters of the rows of a generate(): which there are, and their places in a table."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from ...blocks import ADAPTER_SLOT
from ...kv import Sequences
from ..hooks import adapters_of_rows, names_of_rows
from ..lora import combine
from ..peft_layers import LoraLayers
from ..ranks.tensor_parallel import mesh_of
from ..snapshot import ModelSnapshot
from .apply import AdapterBatch, applied
from .joint import note_places
from .table import AdapterTable
from .warmup import compiling

SLOTS = 8
"""Adapters, or sets of them that are active together, that a table has room for at first."""
AdapterNames = tuple[str, ...]


class StepAdapters(NamedTuple):
    """The adapters of the rows of one step."""

    form: Hashable
    """The facts about them that a captured step relies on."""
    layers: Sequence[nn.Module] = ()
    table: AdapterTable | None = None
    """Where kernels find them; None if peft's own code computes them."""
    slots: Sequence[int] = ()
    """The column adapter_slot of the rows, if kernels compute the adapters."""

    def applied(self, sequences: Sequences) -> AbstractContextManager[None]:
        """Let a forward's layers add the adapters in the slots of its rows."""
        if self.table is None:
            return nullcontext()
        slots = sequences.column(ADAPTER_SLOT.name, self.table.device)
        return applied(self.layers, None if slots is None else AdapterBatch(self.table, slots))


class RowAdapters:
    """The adapters of one model in generate().

    Which adapter a row has is an input of a captured step: a step that was captured with one serves all
    others, and those that come later. Without kernels peft's own layers compute them, and captured steps
    stand for the same adapters only.
    """

    def __init__(self) -> None:
        self.table: AdapterTable | None = None
        self._slots: OrderedDict[AdapterNames, int] = OrderedDict()
        self._facts: dict[AdapterNames, Any] = {}
        """Facts about the tensors in the table."""
        self._checked: weakref.ref[ModelSnapshot] | None = None
        """The model when the table was compared with it; these adapters must not keep it."""

    def of_step(
        self, snapshot: ModelSnapshot, rows: int, kernels: Any, device: torch.device, foreign: bool = True
    ) -> StepAdapters | None:
        """The adapters of a step's rows; None if the model has none.

        foreign: whether anything may have changed since the last step on this snapshot.
        """
        lora = snapshot.lora
        if not lora.apart:
            return None
        names = names_of_rows(snapshot.hooked, rows, lora.active)
        # On ranks a sum of parts has no place for one more. Where an aLoRA begins, only peft knows.
        pefts = mesh_of(snapshot.model) is not None or lora.invoked
        used = {name for each in names for name in each}
        if not all(lora.is_by_kernels(name, mixed=True) for name in used):
            mixed = adapters_of_rows(snapshot.hooked, rows) is not None
            pefts = pefts or not all(lora.is_by_kernels(name, mixed) for name in used)
        if kernels is None or pefts or (self.table is not None and self.table.why_not is not None):
            return self._in_peft(lora, names)
        checked = None if self._checked is None else self._checked()
        if foreign or checked is not snapshot or any(each not in self._slots for each in names if each):
            self._refresh(snapshot.model, lora, names, kernels, device)
            self._checked = weakref.ref(snapshot)
        assert self.table is not None
        if self.table.why_eager is not None:
            return self._in_peft(lora, names)
        form = "slots", self.table.layout
        return StepAdapters(form, lora.layers, self.table, [self._slots.get(each, -1) for each in names])

    def _in_peft(self, lora: LoraLayers, names: list[AdapterNames]) -> StepAdapters:
        """A step in which peft's own layers compute: it depends on each adapter, its layers and where it
        lies.
        """
        used = {name: lora.read(name) for each in names for name in each}
        places = {layer: place for place, layer in enumerate(lora.layers)}
        facts = [
            (name, places[layer], *map(_tensor_facts, part.tensors), part.settings)
            for name, found in used.items()
            for layer, parts in found.layers.items()
            for part in parts
        ]
        return StepAdapters(("modules", tuple(names), repr(facts)))

    def _refresh(
        self,
        model: nn.Module,
        lora: LoraLayers,
        names: list[AdapterNames],
        kernels: Any,
        device: torch.device,
    ) -> None:
        """Let the table hold the adapters of these rows as they are now."""
        distinct = [each for each in dict.fromkeys(names) if each]
        table = self.table
        if table is None or table.device != device or len(distinct) > len(table.slots):
            slots = max(SLOTS, 1 << (len(distinct) - 1).bit_length())
            table = self.table = AdapterTable(slots, device, kernels)
            self._slots.clear()
            self._facts.clear()
            note_places(model)
            table.lay_out(lora.layers, [lora.read(name) for name in lora.names])
            compiling(table, next(model.parameters()).dtype).wait()
        for each in distinct:
            parts = [lora.read(name) for name in each]
            facts = [part.versions for part in parts]
            slot = self._slot_of(each, distinct)
            if self._facts.get(each) != facts or table.has_copies(slot):
                table.put(slot, combine(parts))
                self._facts[each] = facts

    def _slot_of(self, each: AdapterNames, needed: list[AdapterNames]) -> int:
        """The slot of an adapter, another one's that is not needed now if there is no other."""
        assert self.table is not None
        slot = self._slots.get(each)
        if slot is None:
            free = set(range(len(self.table.slots))) - set(self._slots.values())
            if not free:
                oldest = next(other for other in self._slots if other not in needed)
                del self._facts[oldest]
                free = {self._slots.pop(oldest)}
            slot = self._slots[each] = min(free)
        self._slots.move_to_end(each)
        return slot

    @contextmanager
    def forward(
        self, snapshot: ModelSnapshot, sequences: Sequences, rows: int, kernels: Any, device: torch.device
    ) -> Iterator[bool]:
        """Around a forward outside of captured steps: rows get their adapters from kernels there, too, so
        that both round alike. The answer is whether they do. sequences: those of the rows.
        """
        named = adapters_of_rows(snapshot.hooked, rows) is not None
        wanted = snapshot.lora.apart and (named or kernels is not None)
        found = self.of_step(snapshot, rows, kernels, device) if wanted else None
        if found is None or found.table is None:
            yield False
            return
        sequences.put(ADAPTER_SLOT.name, found.slots)
        with found.applied(sequences):
            yield True


def _tensor_facts(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype
