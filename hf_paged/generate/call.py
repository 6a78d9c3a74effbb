"""One call of generate(): its request, and the state to restore at its end."""

from __future__ import annotations

import threading
import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..kv import fork_safe_lock, in_forked_process
from ..kv.checksums import CorruptedBlock
from ..model.adapters.peft_changes import let_changes_wait
from ..model.attention import NAME
from ..model.device_map import forwards_without_hooks
from ..model.dispatch import may_skip_autograd
from ..model.mla import defer_expansion, expanding_classes
from ..model.patches import LentForward, ReplacedForward
from ..model.ranks.tensor_parallel import local_forwards
from ..model.registry import memory_of
from ..model.snapshot import CallSnapshots, call_snapshots
from ..model.support import warn, why_left
from ..model.switch import decoder_configs, modules_of, restore, switch
from .cache import PagedCache, paged_parts
from .forward import wrap
from .given_past import prepared
from .ranks import any_rank
from .routing import ReturnedRouting


class _Plug:
    """A model whose forward is wrapped and whose attention is ours while at least one call runs."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: set[Call] = set()
        self.plugged = False
        """True if all of it is in place."""
        modules = modules_of(model)
        self.configs = decoder_configs(modules)
        self.expanding = expanding_classes(modules)
        wrapper = wrap(model, model.forward, bool(self.configs), may_skip_autograd(modules))
        outermost = ReplacedForward(model, model.__dict__.get("forward"), wrapper)
        found = [outermost, *local_forwards(model), *forwards_without_hooks(modules)]
        # mypy knows no tuple that can be called.
        self.forwards = [each._replace(ours=LentForward(*each)) for each in found]  # type: ignore[arg-type]

    def plug_in(self) -> None:
        defer_expansion(self.expanding)
        switch(self.configs, NAME, self)
        for each in self.forwards:
            each.replace()
        self.plugged = True

    def unplug(self) -> None:
        self.plugged = False
        restore(self.configs, self)
        for each in self.forwards:
            each.restore()  # a wrapper that stays only passes through without a paged cache


_plugs: weakref.WeakKeyDictionary[nn.Module, _Plug] = weakref.WeakKeyDictionary()
_running: set[Call] = set()
"""The calls whose generate() has not ended. A call leaves it in one operation of the interpreter, which no
interrupt divides.
"""
_lock = fork_safe_lock()


def _settle(model: nn.Module) -> None:
    """Have a model plugged in while one of its calls runs, and as before when none does. An interrupted one
    may be repeated.
    """
    with _lock:
        plug = _plugs.get(model)
        if plug is None:
            return
        plug.calls &= _running
        if not plug.calls:
            plug.unplug()
            _plugs.pop(model, None)
        elif not plug.plugged:
            plug.plug_in()


def settle_models() -> None:
    """Leave every model as it was that no call runs on: an interrupt may have kept its last call from doing
    so.
    """
    for model in list(_plugs):
        _settle(model)


@dataclass(eq=False)
class Call:
    """A running generate(). `by_keyword`: whether the word was a keyword; a config may request pages as well.

    Everything that a call takes it gives back in `close`, which may be repeated: an interrupt within it
    leaves the rest to the next call of it.
    """

    by_keyword: bool
    model: nn.Module | None = None
    configured_class: str = ""
    """The class of the model whose generation config has the word; nothing if no config had it."""
    decided: bool = False
    """True once a cache was prepared or left to stock here; a model may prepare its caches without us."""
    made: list[PagedCache] = field(default_factory=list)
    used: list[PagedCache] = field(default_factory=list)
    routing: ReturnedRouting | None = None
    """The routing that its answer is to have; None if it has none."""
    thread: int = field(default_factory=threading.get_ident)
    left: bool = False
    """True once the end of the call has begun."""
    outer: Call | None = field(default_factory=lambda: current_call.get())
    outer_snapshots: CallSnapshots | None = field(default_factory=call_snapshots.get)
    outer_prepared: PagedCache | None = field(default_factory=prepared.get)

    def open(self, snapshots: CallSnapshots) -> None:
        """The call of generate() begins."""
        let_changes_wait()
        if _plugs:
            settle_models()
        _running.add(self)
        current_call.set(self)
        call_snapshots.set(snapshots)
        prepared.set(None)

    def plug(self, model: nn.Module, caches: list[PagedCache], made: bool) -> None:
        """Begin to run `model` on `caches`, which this call made or was given."""
        self.made += caches if made else []
        self.used += caches
        if made and len(caches) == 1:
            prepared.set(caches[0])
        for cache in caches:
            cache.mask_read = False
        if self.model is not None:
            return
        with _lock:
            self.model = model
            plug = _plugs.get(model)
            if plug is None:
                plug = _plugs[model] = _Plug(model)
            plug.calls.add(self)
            _settle(model)

    def close(self, answer: Any) -> None:
        """Leave everything as it was; `answer` is None if the call failed, and its own caches' blocks are
        back at once. Twice is once.
        """
        _running.discard(self)
        current_call.set(self.outer)
        call_snapshots.set(self.outer_snapshots)
        prepared.set(self.outer_prepared)
        if self.configured_class and not self.decided and answer is not None:
            self.decided = True
            warn(f"{self.configured_class} prepares its caches itself")
        self.leave(answer)

    def leave(self, answer: Any) -> None:
        """Restore the model."""
        model = self.model
        if model is None:
            return
        memory = memory_of(model)
        broken = self.left or answer is None
        memory.suspect |= broken
        self.left = True
        try:
            _settle(model)
            self._publish_prefixes(model, answer is not None)
        finally:
            self._free_caches(model, answer is not None)
        if answer is not None and bypassed(self.used[0], answer):
            warn(why_left(model))
        # Tables of the operation that broke off live as long as its traceback: count again without them.
        memory.suspect |= broken
        self.model = None
        if not broken:
            require_sound(model, self.used)

    def _publish_prefixes(self, model: nn.Module, succeeded: bool) -> None:
        """Publish the blocks of the caches for prefix reuse."""
        with memory_of(model).lock:
            for cache in self.used:
                if cache.reuse is not None:
                    try:
                        if succeeded:
                            cache.settle()
                            cache.reuse.commit(model)
                    finally:
                        cache.reuse.leave()

    def _free_caches(self, model: nn.Module, succeeded: bool) -> None:
        """Free the blocks of caches that the call does not return."""
        memory = memory_of(model)
        memory.paths = [str(path) for path in self.used[0].paths]
        if not succeeded:
            memory.drain()
            memory.suspect = bool(self.made)
            for cache in self.made:
                cache.reset()
        for cache in self.used:
            if cache.ended is None:  # else rows have left it, and it ends with the call
                cache.spread()
        memory.drain()


def require_sound(model: nn.Module, caches: list[PagedCache]) -> None:
    """Raise if the checks of bytes have found a corrupted block in these caches, on any rank."""
    if all(cache.config.verify != "bytes" for cache in caches):
        return
    error: CorruptedBlock | None = None
    with memory_of(model).lock:
        for part in (part for cache in caches for part in paged_parts(cache)):
            for rows in part.sequences.rows.values():
                try:
                    rows.require_sound()
                except CorruptedBlock as found:
                    error = error or found
    if any_rank(model, error is not None):
        raise error or CorruptedBlock("another rank has found a corrupted block, and says which")


def _end_calls_of_other_threads() -> None:
    """In a forked process: end the calls of the parent's other threads."""
    for call in list(_running):
        if call.thread == threading.get_ident():
            continue
        for cache in call.used:
            for rows in cache.sequences.rows.values():
                rows.torn = True
        _running.discard(call)
        call.leave(None)


in_forked_process(_end_calls_of_other_threads)


def bypassed(cache: PagedCache, answer: Any) -> bool:
    """True if the tokens of `answer` went through another cache than the one that was prepared."""
    sequences = answer if isinstance(answer, torch.Tensor) else getattr(answer, "sequences", None)
    return (
        isinstance(sequences, torch.Tensor)
        and sequences.ndim == 2
        and cache.get_seq_length() < sequences.shape[1] - 1
    )


current_call: ContextVar[Call | None] = ContextVar("hf_paged_call", default=None)
