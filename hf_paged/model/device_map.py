"""Layers on several devices: accelerate's hooks move what a module is given to where the module lies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..kv import LayerGroup
from .offloaded import HOOK, input_device
from .patches import ReplacedForward, mark_wrapper
from .switch import modules_of

RUNS_CLASS = "hf_paged_runs_class"
"""The attribute of a forward that does what the module's class does."""


def only_moves(module: nn.Module) -> bool:
    """True if the forward that is set on a module is accelerate's, which moves what it is given and what it
    answers, and its class's.
    """
    own = module.__dict__.get("forward")
    hook: Any = module.__dict__.get(HOOK)
    inner = module.__dict__.get("_old_forward")
    return (
        isinstance(own, functools.partial)
        and own.args == (module,)
        and own.func.__module__ == type(hook).__module__ == "accelerate.hooks"
        and type(hook).__name__ == "AlignDevicesHook"
        and not hook.offload
        and not hook.no_grad
        and getattr(inner, "__func__", None) is type(module).forward
    )


def forwards_without_hooks(modules: Sequence[nn.Module]) -> list[ReplacedForward]:
    """Forwards without accelerate's hooks for the modules inside each block that lies on one device whole.

    The block's own hook has moved what they are given. Every linear layer has such a hook, and all of them
    together take longer than a step does on a device. modules: all of a model, itself first.
    """
    found: list[ReplacedForward] = []
    hooked = [each for each in modules[1:] if HOOK in each.__dict__]
    inner = {id(part) for each in hooked for part in modules_of(each)[1:]}
    for block in [each for each in hooked if id(each) not in inner]:
        inside = [each for each in modules_of(block)[1:] if HOOK in each.__dict__]
        places = [each.__dict__[HOOK].execution_device for each in (block, *inside) if only_moves(each)]
        if len(places) == len(inside) + 1 and len(set(places)) == 1:
            found += [ReplacedForward(each, each.__dict__["forward"], _inner(each)) for each in inside]
    return found


def _inner(module: nn.Module) -> Callable[..., Any]:
    """A module's forward without its hook."""
    inner: Callable[..., Any] = module.__dict__["_old_forward"]

    @functools.wraps(module.__dict__["forward"])
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    mark_wrapper(forward)
    setattr(forward, RUNS_CLASS, True)
    return forward


def runs_class_forward(module: nn.Module) -> bool:
    """True if a call of a module runs its class's forward and nothing else."""
    own = module.__dict__.get("forward")
    return own is None or getattr(own, RUNS_CLASS, False)


def is_spread(model: nn.Module) -> bool:
    """True if a model's weights lie on several devices."""
    return len({each.device for each in model.parameters()}) > 1


def devices_of(model: nn.Module, groups: Iterable[LayerGroup]) -> list[torch.device]:
    """The devices that a model computes on, that of its inputs first. groups: those of its layers."""
    stores = frozenset().union(*(group.devices for group in groups))
    if len(stores) < 2:
        return list(stores)
    first = input_device(model)
    others = stores | {each.device for each in model.parameters()}
    return [first, *sorted(others - {first}, key=str)]
