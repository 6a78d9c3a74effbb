"""Which memory belongs to which model."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import nn

from ..kv import Memory, fork_safe_lock, in_forked_process
from .cache_name import cache_in

_memories: weakref.WeakKeyDictionary[nn.Module, Memory] = weakref.WeakKeyDictionary()
_lock = fork_safe_lock()


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft wrapper; any other model as it is."""
    unwrap = getattr(model, "get_base_model", None)
    base: Any = unwrap() if callable(unwrap) else model
    if type(model).__module__ == "peft.mixed_model":
        base = cast(Any, model).base_model.model
    if not isinstance(base, nn.Module):
        raise TypeError(f"expected a model, got {type(model).__name__}; load one by from_pretrained()")
    return base


def memory_of(model: nn.Module) -> Memory:
    """The model's memory, made at the first call. It lives as long as the model."""
    with _lock:
        memory = _memories.get(model)
        if memory is None:
            # A copied model brings the hook along.
            if before_forward not in model._forward_pre_hooks.values():
                _remove_earlier_hooks(model)
                model.register_forward_pre_hook(before_forward, with_kwargs=True)
            memory = _memories[model] = Memory()
            weakref.finalize(model, memory.let_go).atexit = False
        return memory


def _remove_earlier_hooks(model: nn.Module) -> None:
    """Remove the hooks that this module registered before it was reloaded, or imported a second time."""
    for key, hook in list(model._forward_pre_hooks.items()):
        name = getattr(hook, "__module__", None), getattr(hook, "__name__", None)
        if name == (__name__, before_forward.__name__):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)


def known_memory(model: nn.Module) -> Memory | None:
    """The model's memory, if it has one."""
    return _memories.get(model)


def memories() -> list[Memory]:
    """The memory of every model that has one."""
    with _lock:
        return list(_memories.values())


def _recount() -> None:
    """In a forked process: the books may have been copied in the middle of another thread's change."""
    for memory in memories():
        memory.suspect = True


in_forked_process(_recount)


def release(model: nn.Module) -> int:
    """Give back the pools that the model keeps between calls, and answer with the number of bytes.

    Blocks that a cache still holds stay: drop the cache first.
    """
    memory = _memories.get(base_model(model))
    return 0 if memory is None else memory.release()


def invalidate(model: nn.Module) -> None:
    """Let no prompt begin with anything that is cached now: call this after a change of the model that cannot
    be detected.

    Caches in use continue as they are; what they hold, and what is computed after it, is not found either.
    """
    memory = _memories.get(base_model(model))
    if memory is not None:
        memory.forget()


def before_forward(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """A forward that trains wants the memory: idle pools that do not fit go then. One on a padded cache needs
    the mask.

    A hook of every model that has a memory, found by name when the model is pickled.
    """
    memory = _memories.get(model)
    trains = model.training and torch.is_grad_enabled()
    if memory is not None and trains is not memory.training.runs:
        if trains:
            memory.make_way()
        else:
            memory.training.end()
    sequences = getattr(cache_in(kwargs), "sequences", None)
    if sequences is not None and sequences.starts is not None and kwargs.get("attention_mask") is None:
        raise ValueError(
            "this cache holds rows of different lengths; pass the attention_mask that it was begun with"
        )
