"""peft's Adaption Prompts: attention layers around the model's own, which it has while they are active.

The inactive ones are known to peft's wrapper of the model alone.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn

from .patches import own_forward

_wrappers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def note_wrapper(outer: Any, model: nn.Module) -> None:
    """Note the owner of a model's Adaption Prompts, if what a user holds is peft's wrapper of the model. A
    note keeps nothing alive.
    """
    wrapper = getattr(outer, "base_model", None)
    if type(wrapper).__name__ == "AdaptionPromptModel":
        _wrappers[model] = weakref.ref(wrapper)


def wrapper_of(model: nn.Module) -> Any:
    """The owner of a model's Adaption Prompts; None if it has none, or nobody has noted them."""
    known = _wrappers.get(model)
    return None if known is None else known()


def configs_of(model: nn.Module) -> Any:
    """peft's configs of a model's adapters by their names; None if it has none."""
    return model.__dict__.get("peft_config") or getattr(wrapper_of(model), "peft_config", None)


def is_prompted(module: Any) -> bool:
    """True for an attention layer with an Adaption Prompt."""
    return type(module).__module__ == "peft.tuners.adaption_prompt.layer"


def active_in(wrapper: Any) -> tuple[str, ...]:
    """The Adaption Prompt that the model computes with now."""
    return tuple(wrapper.active_adapters) if wrapper._enabled else ()


def layers_of(wrapper: Any, name: str) -> list[Any]:
    """The attention layers of an Adaption Prompt, in the model or not."""
    cached = wrapper._cached_adapters.get(name)
    if cached is not None:
        return list(cached)
    where = wrapper.peft_config[name].target_modules
    return [getattr(parent, where) for parent in wrapper._parents[name]]


def put_into(twin: nn.Module, model: nn.Module, name: str) -> None:
    """Put the attention layers of a model's Adaption Prompt into a plain twin of it: the same tensors."""
    wrapper = wrapper_of(model)
    where = wrapper.peft_config[name].target_modules
    paths = {id(module): path for path, module in model.named_modules()}
    for parent, layer in zip(wrapper._parents[name], layers_of(wrapper, name), strict=True):
        place = twin.get_submodule(paths[id(parent)])
        own = copy.copy(layer)
        own._modules = {**layer._modules, "model": getattr(place, where)}
        own._parameters = dict(layer._parameters)
        if own_forward(layer) is None:
            own.__dict__.pop("forward", None)  # ours, while a step runs
        setattr(place, where, own)
