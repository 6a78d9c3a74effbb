"""The content of adapters by name, and whether it has changed since it was looked at (contract C24)."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ...blocks import extra_key
from ..adaption_prompts import configs_of, wrapper_of
from ..identity import identity_of
from ..lora import Adapter, combine, require_together
from ..parts import LowRank
from ..peft_layers import LoraLayers, unmerge_disabled
from ..shards import local_part
from ..snapshot import StateKey
from .invocation import Invocation, invocation_in
from .loading import HostAdapter
from .peft_content import PeftContent
from .peft_loading import PeftAdapter
from .tasks import tasks_of
from .virtual import VirtualPrompts
from .vocabulary import Vocabularies, ends_of


class _AdapterLook(NamedTuple):
    """An adapter of the peft model when it was looked at."""

    number: int
    versions: StateKey
    ids: frozenset[int]
    """Its tensors."""
    reads_base: bool
    """True if it is computed from the model's weights, too."""


class AdapterContents:
    """Adapters by name: those of a peft model, which lie there and may change, and others, which never do."""

    def __init__(self, model: nn.Module, virtual: VirtualPrompts) -> None:
        self.prompts = wrapper_of(model)
        """The owner of the model's Adaption Prompts; None if it has none. It is kept alive here."""
        self.virtual = virtual
        """Those that are virtual tokens, and change no layer."""
        self.own: dict[str, HostAdapter | PeftAdapter] = {}
        """Those that no module holds."""
        self.kernels = False
        """True if kernels compute adapters: what they cannot is then left to peft's own modules."""
        self._model = model
        self._in_model: LoraLayers | None = None
        self._configs: Any = None
        """Peft's notes on the model when it was looked at."""
        self._followed = self._noted()
        """The same when `own` followed it."""
        self._seen: dict[str, _AdapterLook] = {}
        self._stale: set[str] = set()
        """Those to be read again, whatever torch has counted: fused optimizers write without that."""

        self.vocabularies = Vocabularies(model)
        """Those of adapters that kernels compute."""
        self.others: list[nn.Module] = []
        """Modules of peft's in the model that must add nothing while it computes alone, beside `layers`."""

    # ---- which there are

    @property
    def in_model(self) -> LoraLayers:
        """Those of the peft model, as its modules were when it was looked at."""
        found = self._in_model  # any thread may ask for another look
        if found is None:
            self._configs = self._noted()
            unmerge_disabled(self._model)
            found = self._in_model = LoraLayers.of(self._model)
        return found

    def _noted(self) -> Any:
        """Peft's notes on a model: which adapters there are."""
        configs = configs_of(self._model)
        return configs, None if configs is None else tuple(configs)

    def look_again(self) -> None:
        """Modules with adapters may have come or gone, if peft is there to make them."""
        self.virtual.forget()
        if "peft" in sys.modules:
            self._in_model = None

    def look_if_moved(self) -> None:
        """Look again if peft's notes, or merged weights, show that adapters have come or gone."""
        known = self._in_model
        if known is not None and (self._noted() != self._configs or known.merged_since()):
            self._in_model = None

    def refresh(self) -> bool:
        """Anything may have happened to the peft model: read all again. True if `own` have to follow it."""
        self._in_model = None
        self.virtual.forget()
        self._stale |= self._seen.keys()
        before = self._followed
        self._followed = self._noted()
        return bool(before != self._followed)

    def has(self, name: str) -> bool:
        """True if there is an adapter of this name."""
        return name in self.own or self.in_model.has(name)

    @property
    def names(self) -> list[str]:
        """The names of those in the peft model, if they can be taken apart from it."""
        return self.in_model.names if self.in_model.why_whole is None else []

    def why_apart(self, name: str) -> str | None:
        """Why peft's own modules must compute an adapter, in a forward of its own."""
        own = self.own.get(name)
        if own is not None:
            return own.why_apart
        reason = self.in_model.reasons.get(name)
        if reason is None and self.kernels and not self.in_model.is_by_kernels(name):
            return f"the adapter {name!r} has whole norms, which no kernel computes"
        return reason

    def computed(self, name: str) -> Literal["kernels", "apart"]:
        """How an adapter is computed."""
        return "kernels" if self.why_apart(name) is None else "apart"

    def by_kernels(self) -> list[Adapter]:
        """Those of the peft model that kernels compute."""
        names = [name for name in self.names if self.why_apart(name) is None]
        return [self.in_model.read(name) for name in names]

    def apart(self, names: Iterable[str]) -> bool:
        """True if peft's own modules must compute any of them."""
        return any(self.why_apart(name) is not None for name in names)

    def invocation(self, name: str) -> Invocation:
        """The tokens with which an adapter begins; none if it computes all tokens."""
        if name in self.own:
            return self.own[name].invocation
        return invocation_in((configs_of(self._model) or {}).get(name))

    def config(self, name: str) -> Any:
        """Peft's config of an adapter that its own modules compute."""
        own = self.own.get(name)
        return own.config if isinstance(own, PeftAdapter) else (configs_of(self._model) or {}).get(name)

    def is_whole(self, name: str) -> bool:
        """True for an adapter with which all tokens of a forward change each other."""
        adapter = self.own[name] if name in self.own else self.read(name)
        return isinstance(adapter, (PeftAdapter, PeftContent)) and adapter.whole

    @property
    def knows_tasks(self) -> bool:
        """True if an adapter of peft's modules computes each of its tasks in another way."""
        names = [*self.own, *self.in_model.names]
        return any(tasks_of(self.config(name)) for name in names)

    def only_products(self, name: str) -> bool:
        """True if low-rank products of linear layers are all that an adapter is."""
        adapter = None if self.why_apart(name) is not None else self._read(name)
        parts = adapter.parts if isinstance(adapter, Adapter) else []
        return bool(parts) and all(type(part) is LowRank and part.magnitude is None for part in parts)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that any of them adds to."""
        found = dict.fromkeys(self.in_model.layers if self.in_model.why_whole is None else [])
        return list(found | dict.fromkeys(layer for own in self.own.values() for layer in own.host.layers))

    def note_others(self) -> None:
        """Note `others` as they are now."""
        known = set(map(id, self.layers))
        in_model = self.in_model
        self.others = [each for each in in_model.tuners if id(each) not in known] if in_model.beside else []

    def note_vocabularies(self) -> bool:
        """Note which adapters have another vocabulary than the model: True if any has come or gone."""
        known = {name: own.host for name, own in self.own.items()}
        in_model = self.in_model
        for name in self.names:
            known[name] = in_model.read(name, ends_of(self._model))
        return self.vocabularies.note(known)

    def vocabulary(self, names: Iterable[str]) -> int | None:
        """How many tokens a request with these adapters knows, if they are not the model's."""
        own = (each.vocabulary for name in names if isinstance(each := self.own.get(name), PeftAdapter))
        found = chain(own, map(self.vocabularies.by_name.get, names))
        return next(filter(None, found), None)

    def read(self, name: str) -> Adapter | PeftContent:
        """One of the peft model, where its weights are."""
        in_model = self.in_model
        return PeftContent(in_model, name) if in_model.reasons.get(name) else in_model.read(name)

    def on_device(self, names: Iterable[str], device: torch.device) -> Adapter:
        """One adapter that adds what several add: copies of `own`, of the others the weights themselves."""
        own = {name: each for name, each in self.own.items() if isinstance(each, HostAdapter)}
        in_model = self.in_model
        return combine([own[name].copy_to(device) if name in own else in_model.read(name) for name in names])

    def require_together(self, names: Iterable[str]) -> None:
        """Raise ValueError for adapters of which one alone can be active."""
        own, in_model = self.own, self.in_model
        adapters = {name: own[name].host if name in own else in_model.read(name) for name in names}
        require_together(adapters)
        self.vocabularies.require_together(adapters)

    # ---- what they are

    def key(self, names: Iterable[str], again: bool = False, running: Collection[str] = ()) -> bytes:
        """The part of adapters in the key of a request's keys and values. again: whether those that do not
        run are looked at, all of their weights in turns.
        """
        return extra_key(*[self._content(name, again and name not in running) for name in names])

    def _content(self, name: str, again: bool) -> tuple[str | bytes | int, ...]:
        own = self.own.get(name)
        if own is None:
            return name, self._number(name, again)
        return ("", own.key, self._number(name, again)) if own.reads_base else ("", own.key)

    def _is_fixed(self, name: str) -> bool:
        """True for an adapter that never changes: one of the own, unless it reads the model's weights."""
        return name in self.own and not self.own[name].reads_base

    def _read(self, name: str) -> Adapter | PeftContent:
        return self.own[name].host if name in self.own else self.read(name)

    def _number(self, name: str, again: bool) -> int:
        """The number of the content of one in the peft model. Raises Unreadable."""
        if again or name in self._stale or name not in self._seen:
            adapter = self._read(name)
            number = identity_of(self._model).of_adapter(name).prefix_key(adapter)
            tensors, _ = adapter.weights()
            reads_base = isinstance(adapter, Adapter) and any(part.reads_base for part in adapter.parts)
            self._seen[name] = _AdapterLook(
                number, StateKey(adapter.versions, tensors), frozenset(map(id, tensors)), reads_base
            )
            self.in_model.looks.pop(name, None)
            self._stale.discard(name)
        return self._seen[name].number

    def differ(self) -> bool:
        """True if any has another content than when it was last looked at; all are read again."""
        before = {name: seen.number for name, seen in self._seen.items()}
        now = {name: self._number(name, again=True) for name in self.names if name not in self.own}
        return any(before.get(name, number) != number for name, number in now.items())

    def changed(self, names: Iterable[str]) -> set[str]:
        """Which of these were written to since they were looked at, as far as the host sees it. The weights
        of the model that some read are looked at with the model.
        """
        seen = [name for name in names if name in self._seen and not self._is_fixed(name)]
        of_model = [name for name in seen if name not in self.own and name not in self._stale]
        in_model = self.in_model
        if of_model:
            in_model.note_homes()
        written = {name for name in of_model if self._is_written(in_model, name)}
        return written.union(self._stale.intersection(seen))

    def note_weights(self) -> None:
        """The model's weights are others: adapters that are computed from them are to be read again."""
        self._stale |= {name for name, seen in self._seen.items() if seen.reads_base}

    def _is_written(self, in_model: LoraLayers, name: str) -> bool:
        """True unless one of the peft model is surely as it was: its entries, or else all that it is."""
        look = in_model.looks.get(name)
        if look is not None and look.same():
            return False
        try:
            look = in_model.look(name)
            adapter = self._read(name)
            written = not self.has(name) or not self._seen[name].versions.fits(adapter.versions)
        except (KeyError, RuntimeError):  # another thread takes it away at this moment
            return True
        if not written and isinstance(adapter, Adapter) and look.cover(adapter.tensors):
            in_model.looks[name] = look
        return written

    def rewritten(self, names: Iterable[str]) -> bool:
        """True if any was written to since it was looked at, in whatever way."""
        seen = [name for name in names if name in self._seen]
        own = identity_of(self._model)
        return bool(self.changed(seen)) or any(
            own.of_adapter(name).prefix_key(self._read(name), whole=True) != self._seen[name].number
            for name in seen
        )

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has taken a step, on this model or another."""
        groups = optimizer.param_groups
        params = (each for group in groups for each in group["params"] if each.grad is not None)
        written = {id(local_part(each)) for each in params}
        self._stale |= {name for name, seen in list(self._seen.items()) if written & seen.ids}
