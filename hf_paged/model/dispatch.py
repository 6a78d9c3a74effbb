"""Forwards below autograd on a CPU. Even under `no_grad` every operation passes through it: a tenth of a
small model's time.

Unlike in torch's inference mode all tensors are ordinary ones, and in-place writes count as versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from . import patches
from .device_map import only_moves
from .rehearsal import RECORDERS
from .snapshot import HOOKS, TENSORS, hooks_everywhere
from .weights_digest import PLAIN_TENSORS

KNOWN = ("torch.", "transformers.")
"""Packages whose forwards neither change a model nor compute gradients."""
BelowAutograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
"""Skips autograd in its thread from when it is made until it is freed."""


def below_autograd(forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The answer of a forward, computed below autograd where gradients are off."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return forward(**arguments)
    # The guard has no name: the interpreter frees it with this expression, also where an interrupt ends it.
    # A `with` could be interrupted before its end, and a local variable lives as long as a traceback.
    return (BelowAutograd(), forward(**arguments))[1]


def may_skip_autograd(modules: Sequence[nn.Module]) -> bool:
    """True if a model's forwards need nothing of autograd under `no_grad`: plain tensors on a CPU, no code
    but torch's and transformers', no captured steps (they are rehearsed on operations as autograd sees them).

    modules: all of it, itself first.
    """
    if BelowAutograd is None or "cpu" in RECORDERS or modules[0].training or has_foreign_code(modules):
        return False
    if any(module._compiled_call_impl is not None for module in modules):
        return False
    tensors = [each for module in modules for kind in TENSORS for each in module.__dict__[kind].values()]
    return all(each is None or (type(each) in PLAIN_TENSORS and each.is_cpu) for each in tensors)


def runs_unknown_code(model: nn.Module) -> bool:
    """True if forwards run other code than torch's, transformers' and peft's."""
    return has_foreign_code([*model.modules()], (*KNOWN, "peft."))


def has_foreign_code(modules: Sequence[nn.Module], known: tuple[str, ...] = KNOWN) -> bool:
    """True if a forward runs the user's code, which may change the model: hooks, methods, classes.

    modules: all of a model. known: the packages whose code is not the user's.
    """
    if hooks_everywhere():
        return True
    for module in modules:
        own = module.__dict__
        forward = patches.own_forward(module) if "forward" in own else None
        if forward is not None and not (only_moves(module) or patches.is_of_transformers(forward)):
            return True
        for kind in HOOKS:
            if own[kind] and not all(map(patches.only_observes, own[kind].values())):
                return True
    kinds = set(map(type, modules))
    code = [each for kind in kinds for each in (kind, getattr(kind, "forward", None))]
    return not all(str(getattr(each, "__module__", "")).startswith(known) for each in code)
