"""Twins of a model: the same tensors in modules of our own, in which peft's modules compute one adapter.

Which adapter of a peft model computes is a flag on each of its modules. A twin has flags of its own: nothing
of the user's model is switched, whoever computes with it meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..adaption_prompts import put_into
from ..patches import own_forward
from ..peft_layers import LoraLayers, names_of
from ..peft_parts import base_of, inner_of, takes_products
from ..snapshot import INTERNAL
from ..switch import modules_of
from .state_dict import widths_of
from .tasks import giving_task, modules_by_task

TENSORS = ("_parameters", "_buffers")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Functions of the user's, perhaps of an object that goes on changing."""


class NoTwin(ValueError):
    """A model, or an adapter, of which no twin can be made."""


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of a model's modules, in eval mode, with the model's own tensors and configs."""
    modules = modules_of(model)
    for module in modules:
        forward = own_forward(module) if "forward" in module.__dict__ else None
        if forward is not None and not _is_bound(forward):
            raise NoTwin(
                f"the forward of {type(module).__name__} was replaced by a function, which a copy of the "
                "model would share; use generate()"
            )
    memo: dict[int, Any] = {}
    with _SharedTensors():
        for each in _shared(model, modules):
            memo[id(each)] = each
        try:
            twin: nn.Module = copy.deepcopy(model, memo)
        except Exception as error:
            raise NoTwin(
                f"the modules of {type(model).__name__} cannot be copied ({type(error).__name__}: {error}); "
                "use generate()"
            ) from error
    for module in modules_of(twin):
        given = module.__dict__.get("forward")
        if given is not None and own_forward(module) is None:
            del module.__dict__["forward"]  # ours, while a step runs
        let_write(module)
        keep_nothing(module)
    # Modules keep what they have computed of weights in eval mode until they leave it.
    return twin.train().eval()


class _SharedTensors(TorchFunctionMode):
    """Copies have the same tensors, wherever these are found."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return args[0]
        return func(*args, **(kwargs or {}))


def _shared(model: nn.Module, modules: Iterable[nn.Module]) -> Iterator[object]:
    """All that a twin has in common with its model."""
    for name, value in model.__dict__.items():
        if name in INTERNAL and not isinstance(value, (dict, set, bool)):
            yield value
    for module in modules:
        for part in TENSORS:
            yield from (each for each in module.__dict__[part].values() if each is not None)
        yield from (each for each in module.__dict__.values() if isinstance(each, torch.Tensor))
        if "config" in module.__dict__:
            yield module.__dict__["config"]
        for hooks in HOOKS:
            owners = (getattr(hook, "__self__", hook) for hook in module.__dict__[hooks].values())
            yield from (each for each in owners if not isinstance(each, nn.Module))


def _is_bound(forward: Any) -> bool:
    """True if a copy of a forward is that of the copied module."""
    return isinstance(forward, partial) or getattr(forward, "__self__", None) is not None


def let_write(wrapper: Any) -> None:
    """Give a module that exchanges the weight of its base in each forward a parameter of its own there, over
    the same memory.
    """
    if type(wrapper).__name__ != "ParamWrapper":
        return
    base = wrapper.get_base_layer()
    known = base._parameters[wrapper.parameter_name]
    base._parameters[wrapper.parameter_name] = nn.Parameter(known.data, requires_grad=False)


def keep_nothing(module: Any) -> None:
    """Have a module of DoRA compute its norm of the model's weights in each forward: `DoraCaching` would have
    it keep the first one, in a module whose modes the user does not change.
    """
    if hasattr(module, "get_weight_norm") and hasattr(module, "_cache_store"):
        module.__dict__["_cache_store"] = _forget


def _forget(key: str, value: object) -> None:
    """Keep nothing."""


def active_twin(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """A twin of a model in which some of its adapters are active, together."""
    twin = twin_of(model)
    if LoraLayers(modules_of(model)).prompts is None:
        activate(twin, names)
        return twin
    twin = without_tuners(twin)
    put_into(twin, model, names[0])
    return twin.train().eval()


def activate(twin: nn.Module, names: Sequence[str]) -> None:
    """Let adapters compute in a twin, together, or none. As peft's set_adapter() does, which would also say
    which of the model's parameters are trained.
    """
    for tuner in LoraLayers(modules_of(twin)).tuners:
        if hasattr(tuner, "adapter_layer_names"):
            known = getattr(tuner, "_adapters", tuner._modules.get("trainable_tokens_delta", names))
            tuner._active_adapter = [name for name in names if name in known]
            tuner._disable_adapters = not tuner._active_adapter


def why_not_together(model: nn.Module, names: Sequence[str]) -> str | None:
    """Why adapters of a peft model cannot be active together."""
    lora = LoraLayers(modules_of(model))
    if lora.prompts is not None:
        return f"{names[0]!r} and {names[1]!r} are Adaption Prompts, of which peft has one active"
    for tuner in lora.tuners:
        if hasattr(tuner, "check_set_adapter"):
            both = [name for name in names if name in tuner._adapters]
            if len(both) > 1:
                kind = type(tuner).__name__.removesuffix("Wrapper")
                return f"{both[0]!r} and {both[1]!r} have parts of the kind {kind} in one place"
    return _why_layers_fail(lora.tuners, names)


def _why_layers_fail(tuners: Iterable[Any], names: Sequence[str]) -> str | None:
    """Why modules of peft's that compute with each of some adapters do not with all of them. One of each
    class and size is tried.
    """
    tried: set[object] = set()
    for tuner in tuners:
        held = [name for name in names if name in names_of(tuner)]
        weight = getattr(base_of(tuner), "weight", None)
        kind = type(tuner), getattr(weight, "shape", None), *held
        if len(held) < 2 or kind in tried:
            continue
        tried.add(kind)
        error = _failure(tuner, held)
        if error is not None and not any(_failure(tuner, [name]) for name in held):
            both = " and ".join(map(repr, held))
            return f"peft's {type(tuner).__name__} does not compute {both} together ({error})"
    return None


def _failure(tuner: nn.Module, names: Sequence[str]) -> str | None:
    """The error of a module of peft's with some adapters on tensors without memory; None if it has none."""
    try:
        twin: Any = twin_of(tuner)
        for module in modules_of(twin):
            for hooks in HOOKS:
                module.__dict__[hooks].clear()  # the user's are for forwards of the model
            for part in TENSORS:
                own = module.__dict__[part]
                own.update({name: each.detach().to("meta") for name, each in own.items() if each is not None})
        activate(twin, names)
        base = base_of(twin)
        width = widths_of(base)[0] if takes_products(twin) else base.weight.shape[-1]
        with torch.no_grad(), giving_task(modules_by_task(twin), 0):
            twin(torch.empty(1, 2, width, dtype=base.weight.dtype, device="meta"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def without_tuners(twin: nn.Module) -> nn.Module:
    """Take peft's modules out of a twin: it is the plain model then."""
    tuners = set(map(id, LoraLayers(modules_of(twin)).tuners))
    for module in modules_of(twin):
        for name, child in module._modules.items():
            while child is not None and id(child) in tuners:
                child = module._modules[name] = inner_of(child)
    for name in ("peft_config", "_hf_peft_config_loaded", "active_adapter", "_weight_conversions"):
        twin.__dict__.pop(name, None)
    return twin
