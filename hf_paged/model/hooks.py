"""Other people's hooks: one that changes something keeps prompts from being reused, others do not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .patches import only_observes
from .peft_layers import BASE, adapter_names_of
from .snapshot import HOOKS


class HookMonitor:
    """Sees whether the hooks of some modules change anything, for the time of a call."""

    def __init__(self) -> None:
        self.changed = False
        """True once a hook has changed a module's arguments or its answer."""
        self._places: list[tuple[weakref.ref[nn.Module], str, int]] = []

    def watch(self, modules: Sequence[nn.Module]) -> None:
        """Look at the hooks of these modules until `leave`, which undoes what an interrupt leaves, too."""
        for module in modules:
            for kind in HOOKS:
                hooks = module.__dict__[kind]
                for key, hook in list(hooks.items()):
                    if not isinstance(hook, MonitoredHook) and _is_harmless(hook):
                        continue
                    self._places.append((weakref.ref(module), kind, key))
                    if not isinstance(hook, MonitoredHook):
                        hooks[key] = hook = MonitoredHook(hook)
                    hook.monitors.append(self)

    @property
    def some(self) -> bool:
        """True if there are hooks that may change something."""
        return bool(self._places)

    def know(self, modules: Sequence[nn.Module]) -> bool:
        """True if all hooks of these modules that may change something were looked at since the start."""
        hooks = (hook for module in modules for kind in HOOKS for hook in module.__dict__[kind].values())
        return all(
            self in hook.monitors if isinstance(hook, MonitoredHook) else _is_harmless(hook) for hook in hooks
        )

    def leave(self) -> None:
        """Put back the hooks that no other call looks at and no owner has removed. Twice is once."""
        for module, kind, key in self._places:
            hooks = getattr(module(), kind, {})
            hook = hooks.get(key)
            if isinstance(hook, MonitoredHook):
                if self in hook.monitors:
                    hook.monitors.remove(self)
                if not hook.monitors:
                    hooks[key] = hook.hook
        self._places = []


class MonitoredHook:
    """A hook that is looked at."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        # Its module is the hook's: checks for hooks of our own must not take it for one.
        self.__module__ = getattr(hook, "__module__", "")
        self.monitors: list[HookMonitor] = []

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        before = [_version(x) for x in tensors]
        answer = self.hook(module, *args, **kwargs)
        # Under inference mode torch does not count in-place writes.
        if answer is not None or None in before or before != [_version(x) for x in tensors]:
            for monitor in self.monitors:
                monitor.changed = True
        return answer


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_harmless(hook: object) -> bool:
    """True if a hook changes nothing, or as peft's only gives a layer the adapter of each row."""
    return adapter_names_of(hook) is not None or only_observes(hook)


def adapters_of_rows(modules: Sequence[nn.Module], rows: int) -> list[str] | None:
    """The adapters of rows by peft's hooks: a layer's last one decides, since failed calls leave theirs."""
    for module in modules:
        for hook in reversed(module._forward_pre_hooks.values()):
            names = adapter_names_of(hook)
            if names is not None and len(names) == rows:
                return names
    return None


def names_of_rows(modules: Sequence[nn.Module], rows: int, active: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The adapters of each row: what peft's hooks give the layers, else those that are active."""
    named = adapters_of_rows(modules, rows)
    if named is None:
        return [active] * rows
    return [() if name == BASE else (name,) for name in named]
