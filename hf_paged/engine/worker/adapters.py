"""The adapters of an engine's requests."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ...blocks import ADAPTER_SLOT, TASK, ColumnFillers
from ...kv import is_out_of_memory
from ...kv.budget import free_bytes
from ...kv.ops import triton_package
from ...kv.warmup import Warming
from ...model.adapters import Adapter, AdapterBatch, AdapterTable, applied
from ...model.adapters.content import AdapterContents
from ...model.adapters.invocation import Invocation
from ...model.adapters.joint import note_places
from ...model.adapters.loading import HostAdapter, read_source
from ...model.adapters.peft_loading import PeftAdapter
from ...model.adapters.virtual import VirtualPrompts
from ...model.adapters.warmup import compiling
from ...model.device_map import is_spread
from ...model.parts import Parts
from ...model.peft_layers import BASE
from ...model.ranks.tensor_parallel import mesh_of
from ...scheduling import AdapterNames, AdapterSlots, Scheduler, SequenceGroup, TokenSequence
from ..multimodal.embed import names_of
from ..requests.params import KEY
from .config import EngineConfig
from .forward_batch import ForwardBatch
from .model_check import when_stepped
from .weakly import weakly

logger = logging.getLogger("hf_paged")

ACTIVE: Literal["active"] = "active"
"""The adapters that are active on the model, as generate() has them."""


class AdapterInfo(NamedTuple):
    """An adapter that requests can name."""

    owner: Literal["model", "engine"]
    """Its owner: the peft model, or the engine that was given it."""
    rank: int
    """0 for virtual tokens."""
    bytes: int
    on_device: bool
    requests: int
    """Unfinished requests that have it."""
    digest: str | None = None
    """That of its content, of the engine's own, which never changes."""
    computed: Literal["kernels", "apart"] = "kernels"
    """By kernels beside other adapters, or by peft's own modules in a forward of its own."""
    vocabulary: int | None = None
    """How many tokens it knows, if they are not the model's."""


class EngineAdapters:
    """Adapters by name, in slots of the device: which are there, and which each token of a step has.

    Those of a peft model are read where they lie, and looked at again as its weights are. Those that the
    engine was given are its own: they wait on the host, and come to the device when a request needs them.
    """

    _over = False
    """True once the engine was closed: nobody needs an adapter that is still being read."""

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        device: torch.device,
        fillers: ColumnFillers,
        outer: Any = None,
    ) -> None:
        """fillers: those of the columns of its rows. outer: peft's wrapper of the model, if it has one."""
        parameter = next(model.parameters())
        self.model = model
        self.device = device
        # Tables lie on one device: layers on several get theirs from plain torch.
        package = None if is_spread(model) else triton_package(config.kernels, device, parameter.dtype)
        self.contents = AdapterContents(model, VirtualPrompts(outer, model, partial(names_of, key=KEY)))
        self.table = AdapterTable(config.max_adapters, device, package, self.contents.vocabularies)
        if self.table.kernels is not None:
            note_places(model)
        self.contents.kernels = package is not None and mesh_of(model) is None
        self.slots = AdapterSlots(
            config.max_adapters, weakly(self._load), weakly(self._is_ready), self.contents.apart,
            config.max_adapter_forwards,
        )  # fmt: skip
        self.apart: Any = None
        """The forwards of adapters that peft's own modules compute: the engine's `ForwardsApart`."""
        self.failed: dict[AdapterNames, Exception] = {}
        """Why adapters could not be loaded."""
        self.leaving: set[str] = set()
        """Those that go when their last request has ended."""
        when_stepped(self.contents)
        when_stepped(self.contents.virtual)
        self.numbers: dict[str, int] = {}
        """Numbers of the engine's own adapters among ranks. No number is given twice."""
        self._next_number = 0
        self._loading: dict[AdapterNames, tuple[Adapter, int, torch.cuda.Event]] = {}
        self.fresh = False
        """True if requests have come whose adapters have not been looked at."""
        self._entered: dict[AdapterNames, bytes] = {}
        """The content of what lies in slots."""
        self._kept: dict[bytes, bytes] = {}
        """The content of adapters that groups go on with, by the key that they began with."""
        self.layers: list[nn.Module] = []
        """The layers that add what kernels compute; none if no adapter is known."""
        self._fillers = fillers
        self.changes = 0
        """How often a slot was given to another adapter, or an adapter came or went."""
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._compiling: Warming | None = None
        """Compiles the kernels that steps with adapters need."""
        self._note_layers()
        self._expect(self.contents.by_kernels())

    def _expect(self, adapters: Iterable[Adapter]) -> None:
        """Adapters that requests may come to name: make room in the tables, and compile the kernels."""
        layout = self.table.layout
        self.table.lay_out(self.layers, adapters)
        if self.table.layout != layout and self.table.kernels is not None:
            self._compiling = compiling(self.table, next(self.model.parameters()).dtype)

    @property
    def why_not(self) -> str | None:
        """Why requests cannot choose among the peft model's adapters."""
        return self.contents.in_model.why_whole

    @property
    def active(self) -> AdapterNames | None:
        """Adapters of all requests where none can choose; None where each has its own."""
        return None if self.why_not is None else self.contents.in_model.active

    def refresh(self) -> None:
        """No request runs, and anything may have happened to the peft model: look at it again."""
        if self.contents.refresh():
            self._note_change()
            for name, own in self.contents.own.items():
                own.follow(self.model)
                self._release(name)
        self._note_layers()
        outdated = self.apart.outdated()
        for names in [each for each in self.slots if self.slots.slot(each) in outdated]:
            self.free(names)

    def follow_model(self) -> None:
        """Requests run, and adapters have come to layers of the peft model, or left them: look at it again.
        What runs keeps what is known of its adapters.
        """
        self.contents.look_again()
        self._note_layers()

    def _note_layers(self) -> None:
        layers = self.contents.layers
        if layers != self.layers:
            self.table.renew_layout()  # a captured step adds to the layers that it was captured with
        self.layers = layers
        if self.contents.note_vocabularies():
            self.table.renew_vocabularies()
        self.contents.note_others()
        self._fillers.fill(ADAPTER_SLOT.name, weakly(self._slots_of) if self.present else None)
        self._fillers.fill(TASK.name, _tasks_of if self.contents.knows_tasks else None)

    @property
    def present(self) -> bool:
        """True if there are adapters, or modules for them in the model."""
        contents = self.contents
        return bool(self.layers or contents.others or contents.own or contents.prompts is not None)

    def changes_layer(self, layer: nn.Module | None) -> bool:
        """True if adapters may add to a layer's outputs."""
        return layer is not None and any(
            each in self.layers or each in self.contents.others for each in layer.modules()
        )

    def stats(self) -> dict[str, float]:
        """How many there are on the device, how many it has room for, and the memory of those that the engine
        has.
        """
        there = list(self.slots)
        own = self.contents.own.keys()
        held = [self.table.slots[self.slots.slot(names)] for names in there if own & set(names)]
        total = sum(adapter.bytes for adapter in held if adapter is not None) + self.table.bytes
        total += sum(each.bytes for each in self.contents.own.values() if each.why_apart is not None)
        counts = {"on_device": len(there), "slots": self.slots.count, "bytes": total}
        return {**counts, **self.apart.stats()}

    def close(self) -> None:
        """Forget all that lies on the device."""
        for names in list(self.slots):
            self.free(names)
        self._fillers.fill(ADAPTER_SLOT.name, None)
        self._over = True
        if self._compiling is not None:
            self._compiling.stop()

    # ---- by name

    def infos(self, users: Callable[[str], int]) -> dict[str, AdapterInfo]:
        """Adapters that can be named."""
        there = {name for names in self.slots for name in names}
        found: dict[str, AdapterInfo] = {}
        for name in self.contents.names:
            adapter = self.contents.read(name)
            facts = adapter.rank, adapter.bytes, name in there, users(name)
            by = self.contents.computed(name)
            known = self.contents.vocabulary([name])
            found[name] = AdapterInfo("model", *facts, computed=by, vocabulary=known)
        for name, own in self.contents.own.items():
            by = self.contents.computed(name)
            known = self.contents.vocabulary([name])
            found[name] = AdapterInfo(
                "engine", own.rank, own.bytes, name in there, users(name), own.digest, by, known
            )
        for name in (*self.contents.virtual.names, *self.contents.virtual.own):
            owner: Literal["model", "engine"] = "engine" if name in self.contents.virtual.own else "model"
            found[name] = AdapterInfo(owner, 0, self.contents.virtual.bytes_of(name), True, users(name))
        return found

    def read(self, name: str, source: Any, config: Any) -> tuple[Mapping[str, torch.Tensor], Any]:
        """An adapter from a folder, a state dict or another peft model: its state dict and its config."""
        if not isinstance(name, str) or name in ("", BASE, ACTIVE):
            raise ValueError(f"name={name!r} cannot name an adapter; give another text")
        self.require_new(name)
        return read_source(source, config, name, lambda: self._over)

    def hold(self, layers: Parts, invocation: Invocation = ()) -> HostAdapter:
        """An adapter on the host, on several ranks the part of this one. Raises MemoryError for one that the
        device has no memory for, even without the others.
        """
        require_room(
            self, sum(tensor.nbytes for parts in layers.values() for part in parts for tensor in part.tensors)
        )
        return HostAdapter(self.model, layers, self.device.type == "cuda", invocation)

    def add(self, name: str, loaded: HostAdapter | PeftAdapter, number: int | None = None) -> None:
        """Let requests name it. number: what rank 0 has called it, on others."""
        self.require_new(name)
        self.contents.own[name] = loaded
        self.numbers[name] = self._next_number if number is None else number
        self._next_number += 1
        self._note_change()
        self._note_layers()
        self._expect([loaded.host] if loaded.why_apart is None else [])

    def require_new(self, name: str) -> None:
        if self.contents.has(name) or name in self.contents.virtual:
            raise ValueError(f"there is an adapter {name!r} already; remove it first, or take another name")

    def leave(self, name: str) -> None:
        """Let no further request name an adapter of the engine's own."""
        if name not in self.contents.own and name not in self.contents.virtual.own:
            if self.contents.has(name) or name in self.contents.virtual:
                raise ValueError(f"{name!r} is the peft model's; delete it there, with model.delete_adapter")
            raise ValueError(self._unknown(name))
        self.leaving.add(name)

    def remove(self, name: str) -> None:
        """Forget an adapter of the engine's own, which no request has."""
        if self.contents.virtual.remove(name):
            self.leaving.discard(name)
            return
        del self.contents.own[name]
        del self.numbers[name]
        self._note_change()
        self.leaving.discard(name)
        self._note_layers()
        self._release(name)

    def _release(self, name: str) -> None:
        """Give back the slots in which an adapter is."""
        for names in [each for each in self.slots if name in each]:
            self.free(names)

    def free(self, names: AdapterNames) -> None:
        """Give back the slot of adapters, if they have one."""
        self._loading.pop(names, None)
        slot = self.slots.release(names)
        if slot is not None:
            self.apart.leave(slot)
            self.table.clear(slot)

    def resolve(self, wanted: Any) -> AdapterNames:
        """The adapters of a request, from what its caller wrote; raises ValueError for what is not there."""
        self.contents.look_if_moved()  # nothing has run since
        in_model = self.contents.in_model
        if isinstance(wanted, str) and wanted == ACTIVE:
            if in_model.why_whole is None:
                return in_model.active
            if in_model.reads_prompts is not None:
                raise ValueError(
                    f"the active adapter {in_model.reads_prompts!r} is an aLoRA, and the engine cannot tell "
                    f"where it begins, since {in_model.why_not}; use generate()"
                )
            return ()
        names = [] if wanted is None or wanted == BASE else [wanted] if isinstance(wanted, str) else wanted
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"adapter={wanted!r}: expected the name of an adapter, a list of names or None")
        why_not = self.why_not
        if why_not is not None:
            raise ValueError(
                f"adapter={wanted!r}: requests cannot choose among this model's adapters, since "
                f"{why_not}; leave adapter out to use the active one, or use generate()"
            )
        for name in names:
            if not self.contents.has(name):
                raise ValueError(self._unknown(name))
            if name in self.leaving:
                raise ValueError(f"the adapter {name!r} is being removed")
        found = tuple(dict.fromkeys(names))
        if len(found) > 1:
            (self.apart if self.contents.apart(found) else self.contents).require_together(found)
        return found

    def why_lost(self, names: AdapterNames, active: AdapterNames | None) -> str | None:
        """Why a request that waits cannot run any more with what it was given. active: as it was then."""
        if self.active != active:
            reason = f": {self.why_not}" if self.why_not is not None else ""
            return f"the model's adapters were changed while a request waited{reason}; submit it again"
        gone = [name for name in names if not self.contents.has(name)]
        if gone:
            return f"the adapter {gone[0]!r} was deleted while a request waited for it"
        return None

    def _unknown(self, name: object) -> str:
        own = {*self.contents.own, *self.contents.virtual.own}
        known = sorted({*own, *self.contents.in_model.names, *self.contents.virtual.names})
        close = difflib.get_close_matches(str(name), known, 1)
        others = f"there are {known}" if known else "give it to the engine by add_adapter()"
        hint = f"did you mean {close[0]!r}?" if close else others
        return f"there is no adapter {name!r}; {hint}"

    # ---- content

    def keep(self, groups: Iterable[SequenceGroup]) -> None:
        """Let groups that have begun go on with their adapters as these are now, on the blocks that they
        have. Their keys stay, so that no other request finds what old and new weights have computed.
        """
        self.contents.note_weights()
        keys: dict[AdapterNames, bytes] = {}
        self._kept = {}
        for group in groups:
            names = group.request.adapter
            if not names or not all(map(self.contents.has, names)):
                continue
            if names not in keys:
                keys[names] = self.contents.key(names, again=True)
                if names in self.slots and names not in self._loading:
                    self._enter(names, self.slots.slot(names))
            self._kept[group.request.adapter_key] = keys[names]

    def renew(self, scheduler: Scheduler) -> list[SequenceGroup]:
        """Look at the adapters of groups that wait: those of another content than their group's key begin
        anew, and so does what lies in their slots. An adapter that a running group has is as that knows it.
        The answer is the groups that begin anew.
        """
        self.fresh = False
        sets = {group.request.adapter for group in scheduler.running}
        running = {name for names in sets for name in names}
        waiting = [group for group in (*scheduler.preempted, *scheduler.waiting) if group.request.adapter]
        new = {group.request.adapter for group in waiting if not group.request.adapter_key}
        wanted = {name for group in waiting for name in group.request.adapter}
        touched = self.contents.changed(wanted - running)
        keys: dict[AdapterNames, bytes] = {}
        rekeyed = []
        for group in waiting:
            names = group.request.adapter
            if names not in keys:
                again = names in new or bool(touched.intersection(names))
                try:
                    keys[names] = self.contents.key(names, again, running)
                    if names in self.slots and names not in sets and self._entered.get(names) != keys[names]:
                        self._enter(names, self.slots.slot(names))
                except Exception as error:
                    self.failed[names] = error
                    keys[names] = b""
            own = group.request.adapter_key
            if keys[names] not in (own, self._kept.get(own)):
                scheduler.rekey(group, keys[names])
                rekeyed.append(group)
        return rekeyed

    # ---- slots

    def _load(self, names: AdapterNames, slot: int) -> None:
        """Begin to bring adapters into a slot. Raises MemoryError if the device has no memory for them beside
        those in other slots.
        """
        self._note_change()
        self.apart.leave(slot)

        def bring() -> None:
            if self.table.slots[slot] is not None:
                self.table.clear(slot)  # its memory may be what the next adapter gets
            own = any(name in self.contents.own for name in names) and not self.contents.apart(names)
            if self._side is None or not own:
                self._enter(names, slot)
                return
            try:
                with torch.cuda.stream(self._side):
                    adapter = self.contents.on_device(names, self.device)
                    event = torch.cuda.Event()
                    event.record(self._side)
            except torch.OutOfMemoryError:
                # The stream of steps may have freed some, which is kept for it.
                self._enter(names, slot)
                return
            self._loading[names] = adapter, slot, event
            self._entered[names] = self.contents.key(names)

        try:
            self.slots.bring(names, slot, bring)
        except Exception as error:
            self._loading.pop(names, None)  # another rank may have failed
            if self.table.slots[slot] is not None:
                self.table.clear(slot)
            others = len([*self.slots]) - 1
            if not is_out_of_memory(error) or not others:
                self.failed[names] = error
                return
            if self.slots.most == self.slots.count:
                logger.warning(
                    "%s has no memory for the adapter %s beside %d others: requests wait until one of these "
                    "is idle; lower the engine's memory_fraction or num_blocks to have %d",
                    self.device, "+".join(names), others, self.slots.count,
                )  # fmt: skip
            raise MemoryError(f"no memory for {'+'.join(names)} beside other adapters") from error

    def _enter(self, names: AdapterNames, slot: int) -> None:
        self.apart.leave(slot)
        if self.contents.apart(names):
            self.table.clear(slot)
            self.apart.enter(names, slot)
        else:
            self.table.put(slot, self.contents.on_device(names, self.device))
        self._entered[names] = self.contents.key(names)

    def _is_ready(self, names: AdapterNames) -> bool:
        """True if adapters are in their slot."""
        if names in self.failed:
            return False
        if names not in self._loading:
            return True
        adapter, slot, event = self._loading[names]
        if not event.query():
            return False
        torch.cuda.current_stream(self.device).wait_event(event)
        for tensor in adapter.tensors:
            tensor.record_stream(torch.cuda.current_stream(self.device))
        try:
            self.table.put(slot, adapter)
        except Exception as error:
            self.failed[names] = error
        self._note_change()
        del self._loading[names]  # behind the put, which an interrupt may have to do again
        return names not in self.failed

    def wait(self) -> bool:
        """Wait for an adapter that is being loaded; False if there is none."""
        for _, _, event in self._loading.values():
            event.synchronize()
            return True
        return bool(self.failed)

    def take_failed(self) -> dict[AdapterNames, Exception]:
        """The adapters that could not be loaded; a later request tries them again."""
        failed = self.failed
        self.failed = {}
        for names in failed:
            self.free(names)
        return failed

    # ---- several ranks

    def places(self) -> dict[int, AdapterNames]:
        """By slot the adapters that have come there."""
        there = [names for names in self.slots if names not in self.failed]
        return {self.slots.slot(names): names for names in there if all(map(self.contents.has, names))}

    def place(self, slot: int, names: AdapterNames) -> None:
        """Let a slot hold what it holds on rank 0."""
        self._loading.pop(names, None)
        before = self.slots.release(names)
        for each in {slot if before is None else before, slot}:
            if self.table.slots[each] is not None:
                self.table.clear(each)
        self.slots.place(names, slot)
        self._enter(names, slot)

    def numbered(self) -> dict[str, int]:
        """Numbers of adapters among ranks: those of the peft model by their order."""
        in_model = {name: -1 - i for i, name in enumerate(sorted(self.contents.names))}
        return {**in_model, **self.numbers}

    def agreement(self) -> object:
        """Facts that all ranks must share."""
        in_model = self.contents.in_model
        return sorted(in_model.names), in_model.why_not, self.active

    def look_as_follower(self) -> bool:
        """No request runs: whether any adapter of the peft model has another content here than before. Slots
        hold what there is now.
        """
        self.refresh()
        differ = self.contents.differ()
        for held in list(self.slots):
            if not all(map(self.contents.has, held)):
                self.free(held)
            elif self._entered[held] != self.contents.key(held):
                self._enter(held, self.slots.slot(held))
        return differ

    # ---- a step

    def _slots_of(self, sequences: Sequence[TokenSequence]) -> list[int]:
        """The slots of sequences' adapters: the filler of their column."""
        return [self.slots.slot(sequence.group.request.adapter) for sequence in sequences]

    def _note_change(self) -> None:
        """Note that slots may be of other adapters than before."""
        self.changes += 1
        self._fillers.renew(ADAPTER_SLOT.name)

    def of_request(self, names: AdapterNames) -> AdapterBatch | None:
        """The adapters of a running request, for a forward of its own."""
        adapter = self.table.slots[self.slots.slot(names)] if names else None
        return None if adapter is None else AdapterBatch.of_one(self.table, adapter)

    def applied(self, batch: AdapterBatch | None) -> AbstractContextManager[None]:
        """Let a forward add the adapters of a batch, or none, whatever is active on the peft model, once the
        kernels that they need are compiled.
        """
        if batch is not None and self._compiling is not None:
            self._compiling.wait()
            self._compiling = None
        return applied(self.layers, batch, self.contents.others)

    def of_batch(self, batch: ForwardBatch, last: torch.Tensor | None = None) -> AdapterBatch | None:
        """The adapters of a forward's tokens. last: the places of those that the head is given."""
        slots = batch.forward_columns.get(ADAPTER_SLOT.name)
        if slots is None:
            return None
        in_torch = self.table.kernels is None or self.table.why_not is not None
        if in_torch and len(set(slots)) == 1:
            adapter = self.table.slots[slots[0]]
            assert adapter is not None
            return AdapterBatch.of_one(self.table, adapter)
        return AdapterBatch(self.table, slots, last)


def require_room(adapters: EngineAdapters, needed: int) -> None:
    """Raise MemoryError for an adapter of the engine's own that the device has no memory for, even if those
    that may leave their slots did.
    """
    own = adapters.contents.own
    there = {name for names in adapters.slots for name in names if name in own}
    leaving = sum(own[name].bytes for name in there if own[name].why_apart is None)
    room = free_bytes(adapters.device) + leaving
    if needed > room and mesh_of(adapters.model) is None:
        raise MemoryError(
            f"the adapter takes {needed:,} bytes and {adapters.device} has {room:,} for adapters; lower the "
            "engine's memory_fraction, or train less of the model (modules_to_save are whole copies)"
        )


def _tasks_of(sequences: Sequence[TokenSequence]) -> list[int]:
    """The tasks of sequences: the filler of their column."""
    return [sequence.group.request.task for sequence in sequences]
