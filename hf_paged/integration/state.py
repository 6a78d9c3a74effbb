"""What a captured step takes for granted about its model: everything that Python decided while it was captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
"""What every module has; parameters, buffers and hooks are looked at by themselves."""
HARMLESS_HOOKS = ("hf_paged.", "transformers.utils.output_capturing")
"""Whose hooks a replay may leave out: they do nothing in a decoding step."""


class ModelState:
    """A model as it is now: two are equal if a step captured over one may be replayed over the other.

    Weights may change where they lie, a replay reads them anew. Whatever else is set, on any module or its config, adapters and
    their scales included, is part of the state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._objects: list[object] = []  # kept, so that no other object gets the name of one that was seen
        self._facts = tuple(self._of_model(model))
        self._hash = hash(self._facts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelState) and self._facts == other._facts

    def _of_model(self, model: nn.Module) -> Iterator[Any]:
        yield torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()
        configs: dict[int, Any] = {}
        for module in model.modules():
            own = module.__dict__
            if "config" in own:
                configs[id(own["config"])] = own["config"]
            for name, value in own.items():
                if name not in INTERNAL and (module is not model or name != "forward"):
                    yield value if type(value) in PLAIN else self._fact(value)
            for tensors in (own["_parameters"], own["_buffers"]):
                for tensor in tensors.values():
                    yield None if tensor is None else tensor.data_ptr()
        for config in configs.values():
            for value in vars(config).values():
                yield self._fact(value)

    def _fact(self, value: Any, depth: int = 0) -> Any:
        """Something hashable that is equal as long as the value is."""
        kind = type(value)  # not isinstance: a config looks every question up in itself
        if kind in PLAIN:
            return value
        if issubclass(kind, torch.Tensor):
            return value.data_ptr(), value.shape, value.dtype
        if depth < 2 and issubclass(kind, (list, tuple, set, frozenset)):
            return tuple([self._fact(part, depth + 1) for part in value])
        if depth < 2 and issubclass(kind, dict):
            return tuple([(name, self._fact(part, depth + 1)) for name, part in value.items()])
        self._objects.append(value)
        return id(value)


def runs_hooks(model: nn.Module) -> bool:
    """Whether somebody's code runs in the middle of a forward, which no replay would call."""
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return True
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not str(getattr(hook, "__module__", "")).startswith(HARMLESS_HOOKS):
                return True
    return False
