"""Which memory belongs to which model."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import nn

from ..kv import Memory, fork_safe_lock, in_forked_process
from .cache_name import cache_in
from .state_slots import SlotStates

_memories: weakref.WeakKeyDictionary[nn.Module, Memory] = weakref.WeakKeyDictionary()
_lock = fork_safe_lock()


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft wrapper; any other model as it is."""
    unwrap = getattr(model, "get_base_model", None)
    base: Any = unwrap() if callable(unwrap) else model
    if type(model).__module__ == "peft.mixed_model":
        base = cast(Any, model).base_model.model
    if not isinstance(base, nn.Module):
        raise TypeError(_not_a_model(model))
    return base


def _not_a_model(given: Any) -> str:
    """An error that says what to give instead."""
    kind = type(given).__name__
    if isinstance(getattr(given, "model", None), nn.Module):  # an engine, a trainer, a pipeline
        return f"expected a model, got {kind}; give its model"
    return f"expected a model, got {kind}; load one by from_pretrained()"


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
    before = model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs
    after = model._forward_hooks, model._forward_hooks_with_kwargs
    for hooks, with_kwargs in (before, after):
        for key, hook in list(hooks.items()):
            name = getattr(hook, "__module__", None), getattr(hook, "__name__", None)
            if name in {(__name__, each.__name__) for each in (before_forward, after_forward)}:
                del hooks[key]
                with_kwargs.pop(key, None)


def end_forwards(model: nn.Module) -> None:
    """Have plain forwards of the model write recurrent states to their slots when they end."""
    with _lock:
        if after_forward not in model._forward_hooks.values():
            model.register_forward_hook(after_forward, with_kwargs=True)


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
    states = getattr(cache_in(kwargs), "states", None)
    if isinstance(states, SlotStates):
        rows = next((each for each in (*kwargs.values(), *args) if _has_tokens(each)), None)
        states.expect((0, 0) if rows is None else rows.shape[:2])


def _has_tokens(given: Any) -> bool:
    """True for ids [rows, new] or embeddings [rows, new, hidden]."""
    return isinstance(given, torch.Tensor) and given.ndim > 1


def after_forward(model: nn.Module, args: Any, kwargs: dict[str, Any], answer: Any) -> None:
    """A plain forward has computed the states of its cache. A hook, as `before_forward` is."""
    states = getattr(cache_in(kwargs), "states", None)
    if isinstance(states, SlotStates):
        states.end()
