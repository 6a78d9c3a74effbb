"""Checks that a model is still the one that the cached blocks were computed with (C24)."""

from __future__ import annotations

import logging
import weakref
from functools import cache
from itertools import chain
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...kv import fork_safe_lock
from ...model.dispatch import has_foreign_code, may_skip_autograd
from ...model.identity import identity_in
from ...model.patches import only_observes, self_written_of
from ...model.peft_layers import settled
from ...model.snapshot import HOOKS, ModelSnapshot
from ...model.weights_digest import PLAIN_TENSORS, Unreadable
from .check_policy import CheckPolicy, WeightsChanged

logger = logging.getLogger("hf_paged")
_watchers: list[weakref.ref[Watcher]] = []
"""Who is told of optimizers' steps."""
_lock = fork_safe_lock()


class ModelCheck:
    """An engine's checks of its model: quick ones under running requests, full ones while there are none."""

    def __init__(self, model: nn.Module, policy: CheckPolicy) -> None:
        self._policy = policy
        self._unreadable = False
        self._stepped = False
        """True once an optimizer has taken a step on the weights: fused ones write without torch's counting.
        """
        self.adapters_moved = False
        """Set when adapters have come to layers, or left them, since whoever reads this has cleared it."""
        when_stepped(self)
        self._snapshot = ModelSnapshot(model, watch=True, alone=True)
        self._parameters = self._snapshot.parameters()
        self._check()

    def touched(self) -> bool:
        """True if a parameter was written by an optimizer, or in a way that torch counts, or replaced, or a
        setting is another. Cheap, for every step.
        """
        if self._stepped or self._snapshot.parameters() != self._parameters:
            return True
        if self._snapshot.same_settings():
            return False
        now = settled(self._look_anew)
        if now is None:
            return True
        parameters = now.parameters()
        if self._snapshot.parameters() != self._parameters:
            return True  # meanwhile
        self.adapters_moved |= now.modules != self._snapshot.modules
        self.adapters_moved |= now.lora.tuners != self._snapshot.lora.tuners
        self._snapshot = now  # equal values in other objects, or adapters beside other layers
        self._parameters = parameters
        self._note_code()
        return False

    def _look_anew(self) -> ModelSnapshot | None:
        """The model as it is, if it is the same one; None if it is another, or is being changed."""
        try:
            now = ModelSnapshot(self._snapshot.model, watch=True, alone=True)
        except (KeyError, RuntimeError):  # another thread changes a setting at this moment
            return None
        differ = now.set_since(self._snapshot) - self_written_of(now.model)
        return now if not differ and now.same_modules(self._snapshot) else None

    def _note_code(self) -> None:
        modules = self._snapshot.modules
        self._policy.skips_autograd = may_skip_autograd(modules)
        self._policy.foreign_forward = not self._policy.skips_autograd and (
            modules[0].training or has_foreign_code(modules)
        )

    def require_untouched(self, running: int) -> None:
        """Raise if they were, under so many requests: WeightsChanged if steps were taken, else nothing is
        lost yet.
        """
        if self.touched():
            if self._policy.unseen:
                raise WeightsChanged(
                    f"the model's weights have changed while {running} requests were running; their latest "
                    "tokens may mix old and new weights, so they were ended. Call engine.pause() before a "
                    "change and engine.resume() after it"
                )
            raise RuntimeError(
                f"the model's weights have changed under {running} running requests; call engine.pause() "
                "before the change (or now) and engine.resume() after it"
            )
        self._policy.mark_clean()

    def memory(self) -> list[object]:
        """Holders of the memory of the model's tensors: while they are kept, no other tensor gets that
        memory.

        A tensor may be given other memory; one that is made of others counts as its own.
        """
        return [
            tensor.untyped_storage() if type(tensor) in PLAIN_TENSORS else tensor
            for tensor in self._snapshot.resident()
        ]

    def changed(self, whole: bool = False) -> bool:
        """True if the content of weights, a setting, a hook or an adapter differs since the last such check.

        True where weights cannot be read. whole: all of the weights are read, not some in turns.
        """
        before = self._state
        self._check(whole)
        self._policy.mark_clean()
        return self._state is None or self._state != before

    def rewritten(self) -> bool:
        """True if weights were written to since the last full check, in a way that torch counts or not."""
        if self.touched():
            return True
        identity = identity_in(self._snapshot)
        try:
            identity.prefix_key(self._snapshot.current(), whole=True)
        except Unreadable:
            return True
        return identity.changes != self._changes

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has taken a step, on this model or another."""
        own = set(map(id, self._snapshot.resident()))
        self._stepped |= any(
            id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]
        )

    def _check(self, whole: bool = False) -> None:
        self._snapshot = snapshot = self._snapshot.current()
        self._note_code()
        self._parameters = snapshot.parameters()
        self._stepped = False
        self.adapters_moved = False
        # Torch numbers hooks, and gives no number twice. Transformers' own, which collect hidden states,
        # come with the first picture.
        hooks = chain.from_iterable(
            module.__dict__[kind].items() for module in snapshot.hooked for kind in HOOKS
        )
        numbers = {number: hook for number, hook in hooks if not only_observes(hook)}
        self._state: Any = None
        try:
            if any(map(_remembers, numbers.values())):
                raise Unreadable("a hook may use values from outside its code")
            key = identity_in(snapshot).prefix_key(snapshot, whole)
            self._state = key, snapshot.alone, list(numbers)
        except Unreadable as reason:
            if not self._unreadable:
                logger.info("prefixes are not reused from before the engine was idle: %s", reason)
            self._unreadable = True
        self._changes = identity_in(snapshot).changes


def _remembers(hook: object) -> bool:
    """True if a hook is more than its code."""
    return not isinstance(hook, FunctionType) or hook.__closure__ is not None


class Watcher(Protocol):
    """An object that is notified of optimizers' steps."""

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has taken a step, on this model or another."""


def when_stepped(watcher: Watcher) -> None:
    """Notify a watcher of every optimizer's steps, as long as it lives."""
    with _lock:
        _hook()
        _watchers[:] = [each for each in _watchers if each() is not None] + [weakref.ref(watcher)]


@cache
def _hook() -> object:
    """One for the process, which stays: while torch goes through its hooks none may go, and a watcher may be
    collected then.
    """
    return register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for whose in tuple(_watchers):
        watcher = whose()
        if watcher is not None:
            watcher.note_step(optimizer)
