"""Changes of a model by peft wait until no forward of ours is under way.

peft replaces layers, and sets the active adapter, one layer after another. A forward in another thread would
meet some layers as they were and some as they will be: a layer that is just being made computes with the new
adapter.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from ..registry import known_memory
from ..switch import modules_of

CHANGES = (
    "inject_adapter",
    "delete_adapter",
    "set_adapter",
    "merge_adapter",
    "unmerge_adapter",
    "_unload_and_optionally_merge",
)
"""Methods of peft's tuners that change the modules of a model."""
OF_PROMPTS = (
    "add_adapter",
    "delete_adapter",
    "set_adapter",
    "enable_adapter_layers",
    "disable_adapter_layers",
)
"""The same of Adaption Prompts, which are no such tuner."""
TUNERS = (
    ("tuners_utils", "BaseTuner", CHANGES),
    ("adaption_prompt.model", "AdaptionPromptModel", OF_PROMPTS),
)
OURS = "hf_paged_waits"
"""The mark of a method that waits."""


def let_changes_wait() -> None:
    """Let peft's changes of a model wait for forwards of ours on it, as soon as peft has been loaded."""
    for where, kind, names in TUNERS:
        tuner: Any = getattr(sys.modules.get(f"peft.tuners.{where}"), kind, None)
        for name in names if tuner is not None else ():
            method = vars(tuner).get(name)
            if method is not None and not hasattr(method, OURS):
                setattr(tuner, name, _waiting(method))


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("model", args[0] if args else None)
        with ExitStack() as held:
            for lock in _locks_of(model if isinstance(model, nn.Module) else getattr(self, "model", None)):
                held.enter_context(lock)
            return method(self, *args, **kwargs)

    setattr(change, OURS, True)
    return change


def _locks_of(model: Any) -> list[Any]:
    """The locks of the memories in a model: its own, or of a model that it is wrapped around."""
    modules = modules_of(model) if isinstance(model, nn.Module) else []
    return [memory.lock for memory in map(known_memory, modules) if memory is not None]
