"""What a captured step takes for granted about its model: everything that Python decided while it was
captured.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import takewhile
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .offloaded import offloads
from .switch import original_implementation

PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
INTERNAL = frozenset(nn.Module().__dict__) - {"training"} | {"generation_config"}
"""What every module has (parameters, buffers and hooks are looked at by themselves), and what no forward
reads.
"""
HARMLESS_HOOKS = ("hf_paged.", "transformers.utils.output_capturing")
"""Whose hooks a replay may leave out: they do nothing in a decoding step."""


class Same:
    """An object as part of a key: equal only to itself, and not kept alive by the key if that can be
    helped.
    """

    __slots__ = ("_hash", "_of")

    def __init__(self, value: object) -> None:
        self._hash = id(value)
        try:
            self._of: Callable[[], object] = weakref.ref(value)
        except TypeError:
            self._of = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self._hash != other._hash:
            return False
        mine = self._of()
        return mine is not None and mine is other._of()


class ModelState:
    """A model as it is now: two are equal if a step captured over one may be replayed over the other.

    Weights may change where they lie, a replay reads them anew. Whatever else is set, on any module or its
    config, adapters and their scales included, is part of the state, and so is the code of the modules with
    the globals that it names. What only a function called by that code looks up, or an object inside an
    object, is not.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self.steady = not model.training
        """Whether a replay does all that the model does: nobody's hooks run in it, nothing is trained."""
        self._facts = tuple(self._of_model(model, forward))
        self._hash = hash(self._facts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ModelState) and self._facts == other._facts)

    def _of_model(self, model: nn.Module, forward: Callable[..., Any]) -> Iterator[Any]:
        yield (
            _products(),
            torch.are_deterministic_algorithms_enabled(),
            Same(getattr(forward, "__func__", forward)),
        )
        everywhere = nn.modules.module
        self.steady &= not everywhere._global_forward_hooks and not everywhere._global_forward_pre_hooks
        configs: dict[int, Any] = {}
        kinds: dict[type, None] = {}
        for module in modules_of(model):
            own = module.__dict__
            kinds[type(module)] = None
            if "config" in own:
                configs[id(own["config"])] = own["config"]
            for name, value in own.items():
                if name not in INTERNAL and (module is not model or name != "forward"):
                    yield value if type(value) in PLAIN else fact_of(value)
            for tensors in (own["_parameters"], own["_buffers"]):
                for tensor in tensors.values():
                    yield None if tensor is None else tensor.data_ptr()
            if own["_forward_hooks"] or own["_forward_pre_hooks"]:
                self.steady &= not _runs_hooks(own)
            self.steady &= not offloads(module)
        for config in configs.values():
            yield original_implementation(config)
            for value in getattr(config, "__dict__", {}).values():
                yield fact_of(value)
        for kind in kinds:
            yield from _code(kind)
        yield self.steady


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once; torch's own walk makes up names."""
    seen, stack = {id(model)}, [model]
    while stack:
        module = stack.pop()
        yield module
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)


def fact_of(value: Any, depth: int = 0) -> Any:
    """Something hashable that is equal as long as the value is."""
    kind = type(value)  # not isinstance: a config looks every question up in itself
    if kind in PLAIN:
        return value
    if issubclass(kind, torch.Tensor):
        return value.data_ptr(), value.shape, value.dtype
    if depth < 2 and issubclass(kind, (list, tuple, set, frozenset)):
        return tuple([fact_of(part, depth + 1) for part in value])
    if depth < 2 and issubclass(kind, dict):
        return tuple([(_name(key), fact_of(part, depth + 1)) for key, part in value.items()])
    if depth < 1 and hasattr(value, "__dict__") and not callable(value):
        return Same(value), tuple([_name(part) for part in vars(value).values()])
    return Same(value)


def _name(value: Any) -> Any:
    """The value itself if that says all, else the object that it is."""
    return value if type(value) in PLAIN else Same(value)


def in_own_code(kind: type) -> list[type]:
    """The classes of which a class of modules has its code, without torch's own, which stays as it is."""
    return list(takewhile(lambda base: not base.__module__.startswith("torch."), kind.__mro__))


def _code(kind: type) -> Iterator[Any]:
    """The code of a class of modules, with what it names in its file."""
    for base in in_own_code(kind):
        for value in vars(base).values():
            if not isinstance(value, FunctionType):
                yield _name(value)
                continue
            yield Same(value)
            place = value.__globals__
            for name in value.__code__.co_names:
                if name in place:
                    yield _name(place[name])
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # nothing in it yet
                    yield _name(cell.cell_contents)


def _products() -> Any:
    """How torch multiplies float32 matrices."""
    matmul = torch.backends.cuda.matmul
    try:
        return matmul.fp32_precision
    except (AttributeError, RuntimeError):  # a torch that only has the old name, or somebody who mixes both
        return matmul.allow_tf32


def _runs_hooks(own: dict[str, Any]) -> bool:
    """Whether somebody's code runs around a module's forward, which no replay would call."""
    hooks = [*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()]
    return any(not str(getattr(hook, "__module__", "")).startswith(HARMLESS_HOOKS) for hook in hooks)


# ---- what a call remembers


@dataclass
class Watch:
    """What a running call has seen of its models, so that not every step looks again."""

    foreign: bool
    """Whether the user's code runs between the steps, and may change a model."""
    states: dict[int, ModelState] = field(default_factory=dict)


watching: ContextVar[Watch | None] = ContextVar("hf_paged_watch", default=None)
"""The running call's watch."""


def runs_foreign_code(arguments: dict[str, Any]) -> bool:
    """Whether code that is not transformers' own runs between the steps of a generate() with these
    arguments.
    """
    several = [*(arguments.get("logits_processor") or ()), *(arguments.get("stopping_criteria") or ())]
    if any(not type(one).__module__.startswith("transformers.") for one in several if one is not None):
        return True
    streamer = arguments.get("streamer")
    if streamer is not None and not type(streamer).__module__.startswith("transformers."):
        return True
    return (
        arguments.get("prefix_allowed_tokens_fn") is not None or arguments.get("custom_generate") is not None
    )
