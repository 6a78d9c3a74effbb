"""Forwards in torch's inference mode on a CPU: every operation costs the host less there.

Tensors that are made in it stay what they are, and cannot be changed or trained on outside. So none may be
left in the model, and a caller is given ordinary ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from . import patches
from .capture.rehearsal import RECORDERS
from .snapshot import BY_LENGTH, HOOKS, hooks_everywhere
from .switch import modules_of
from .weights_digest import PLAIN_TENSORS

T = TypeVar("T")
KNOWN = ("torch.", "transformers.")
"""Modules whose code does not change a model in its forward."""
_left_none: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_left_some: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose forward was seen to leave no tensors in them, or some."""


def has_foreign_code(modules: Sequence[nn.Module]) -> bool:
    """Whether a forward runs the user's code, which may change the model: hooks, methods, classes; or trains.

    modules: all of a model, itself first.
    """
    if hooks_everywhere() or modules[0].training:
        return True
    for module in modules:
        own = module.__dict__
        if "forward" in own and patches.own_forward(module) is not None:
            return True
        for kind in HOOKS:
            if own[kind] and not all(map(patches.only_observes, own[kind].values())):
                return True
    kinds = set(map(type, modules))
    code = [each for kind in kinds for each in (kind, getattr(kind, "forward", None))]
    return not all(str(getattr(each, "__module__", "")).startswith(KNOWN) for each in code)


def suits_inference_mode(model: nn.Module) -> bool:
    """Whether forwards of a model may run in inference mode: plain tensors on a CPU and no foreign code."""
    if model in _left_some or "cpu" in RECORDERS or torch.is_autocast_enabled("cpu"):
        return False
    modules = modules_of(model)
    for module in modules:
        if str(module.__dict__.get("rope_type")) in BY_LENGTH:  # it keeps other angles when a row is long
            return False
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None:
                continue
            if type(tensor) not in PLAIN_TENSORS or tensor.device.type != "cpu" or tensor.is_inference():
                return False
    return not has_foreign_code(modules)


def in_inference_mode(model: nn.Module, forward: Callable[[], T]) -> T:
    """The answer of a forward, run in inference mode. Its tensors are inference tensors."""
    with torch.inference_mode():
        answer = forward()
    if model not in _left_none and model not in _left_some:
        (_left_some if _replace_left(model) else _left_none).add(model)
    return answer


def as_ordinary(answer: Any) -> Any:
    """A model's answer with tensors that can be changed, and trained on."""
    if isinstance(answer, torch.Tensor):
        return answer.clone() if answer.is_inference() else answer
    if isinstance(answer, dict):
        for name, value in answer.items():
            if isinstance(value, (torch.Tensor, tuple)):
                answer[name] = as_ordinary(value)
    return tuple(map(as_ordinary, answer)) if type(answer) is tuple else answer


def _replace_left(model: nn.Module) -> bool:
    """Make inference tensors in a model ordinary ones: whether there were any."""
    found = False
    for module in modules_of(model):
        for own in (module.__dict__, module._buffers):
            for name, value in list(own.items()):
                if isinstance(value, torch.Tensor) and value.is_inference():
                    own[name] = value.clone()
                    found = True
    return found
