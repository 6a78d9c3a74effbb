"""Our own changes to a model, made while a call runs: checks of the model leave them out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from .switch import restore_copies

SETTINGS = frozenset({"_attn_implementation_internal"})
"""Settings of a config that a running call switches; `switch.original_implementation` has the user's."""
HOOKS = ("hf_paged.", "transformers.utils.output_capturing")
"""Modules whose hooks change nothing that a layer computes, and may be left out of a replay."""
MARKS_INPUTS = "enable_input_require_grads.<locals>.make_inputs_require_grads"
"""The hook that trainers of adapters put on embeddings: without gradients it does nothing."""
WRAPPER = "hf_paged_wrapper"
SelfWritten = frozenset[tuple[type, str]]
"""Attributes that the model's own forwards set, by kind of module."""
_self_written: weakref.WeakKeyDictionary[nn.Module, SelfWritten] = weakref.WeakKeyDictionary()


def only_observes(hook: object) -> bool:
    """True if a hook never changes what a layer computes."""
    if str(getattr(hook, "__qualname__", "")).endswith(MARKS_INPUTS):
        return True
    return str(getattr(hook, "__module__", "")).startswith(HOOKS)


def mark_wrapper(wrapper: Callable[..., Any]) -> None:
    """Register a forward of ours, made with functools.wraps around the user's."""
    # Which wrapper it is, since others copy attributes; weakly, or the model would live until a collection.
    setattr(wrapper, WRAPPER, weakref.ref(wrapper))


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that the user has set on a module; None where its class has it."""
    given = module.__dict__.get("forward")
    own: Any = given.own if isinstance(given, LentForward) else given
    while (mark := getattr(own, WRAPPER, None)) is not None and mark() is own:
        own = own.__wrapped__
    return None if getattr(own, "__func__", None) is type(module).forward else own


def wrapped_in(function: Any) -> Iterator[FunctionType]:
    """A function and those that it wraps, from the outermost on: transformers wraps forwards to rename their
    arguments.
    """
    while isinstance(function, FunctionType):
        yield function
        function = function.__dict__.get("__wrapped__")


def is_of_transformers(forward: Any) -> bool:
    """True if a forward that is set on a layer is transformers' own, as where ranks divide it, and wraps no
    other. functools.wraps copies __module__.
    """
    names = [str(each.__globals__.get("__name__")) for each in wrapped_in(forward)]
    return bool(names) and all(name.startswith("transformers.") for name in names)


class ReplacedForward(NamedTuple):
    """A forward of ours for a module's own. Keep it before `replace`, for interrupts."""

    module: nn.Module
    own: Callable[..., Any] | None
    ours: Callable[..., Any]

    def replace(self) -> None:
        """Put ours in, unless the module has been given another since."""
        if self.module.__dict__.get("forward") is self.own:
            self.module.__dict__["forward"] = self.ours

    def restore(self) -> None:
        """Put the module's own back, unless ours has been wrapped since. Twice is once."""
        attributes = self.module.__dict__
        if attributes.get("forward") is self.ours:
            if self.own is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = self.own


class LentForward(ReplacedForward):
    """A forward of ours as a module has it, which a copy of the module does not take along."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ours(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ours, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        restore_copies(memo)
        return deepcopy(self.own or MethodType(type(self.module).forward, self.module), memo)


def note_self_written(model: nn.Module, found: SelfWritten) -> None:
    """Attributes that the model's own forwards set: another value is no change by the user."""
    _self_written[model] = self_written_of(model) | found


def self_written_of(model: nn.Module) -> SelfWritten:
    return _self_written.get(model, frozenset())
