"""The length of a cache in a captured step: only the device knows it, and it differs in every replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map

from .lazy import LazyTensor, NotCapturable

HOST_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "__bool__",
        "__int__",
        "__index__",
        "__float__",
        "item",
        "tolist",
        "numpy",
        "__len__",
        "__format__",
    )
)
PLUS = frozenset(getattr(torch.Tensor, name) for name in ("__add__", "__radd__", "add"))
READING_DUNDERS = frozenset({"__int__", "__index__", "__invert__", "__iter__", "__init__"})
"""Special methods whose names begin like those that change something."""
WARNING = "warn_if_padding_and_no_attention_mask"
"""A method of transformers' models that reads the tokens on the host, only to warn."""


class DeviceNumber(torch.Tensor):
    """A number that only the device knows: it grows from replay to replay, and the host cannot read it."""

    base: torch.Tensor
    """The number that this one was made from, by adding `more`."""
    more: int

    @staticmethod
    def of(number: torch.Tensor, base: torch.Tensor | None = None, more: int = 0) -> DeviceNumber:
        """Wrap number [] as one."""
        made = number.as_subclass(DeviceNumber)
        made.base = number if base is None else base
        made.more = more
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_READS:
            raise NotCapturable(
                f"the model asks for the cache's length on the host ({getattr(func, '__name__', func)})"
            )
        if _writes(func) and args and isinstance(args[0], cls):
            raise NotCapturable("the model changes the cache's length in place")
        # What is computed is an ordinary tensor; only with plain numbers added it is still a length.
        plain: Any = func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))
        if (
            func in PLUS
            and not kwargs
            and len(args) == 2
            and isinstance(args[0], cls)
            and isinstance(args[1], int)
        ):
            return cls.of(plain, args[0].base, args[0].more + args[1])
        return plain


def _writes(func: Any) -> bool:
    """True if a method of tensors changes its tensor: `add_`, `+=`."""
    name = str(getattr(func, "__name__", ""))
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name not in READING_DUNDERS
    )


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, DeviceNumber) else value


def _unreadable() -> torch.Tensor:
    raise NotCapturable("the model computes with an attention mask that grows from step to step")


class GrowingOnes(LazyTensor):
    """A mask of ones over all that the cache holds. It masks nothing; no static length would stay right."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten._to_copy:
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class LengthsOnDevice(TorchFunctionMode):
    """Let a model count from, and make masks up to, a length that the device knows.

    Every call of torch passes through here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met = False
        """True once the model did so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange and any(isinstance(arg, DeviceNumber) for arg in args):
            self.met = True
            return _count(args, kwargs)
        if func is torch.ones and len(args) == 2 and isinstance(args[1], DeviceNumber):
            self.met = True
            device = torch.device("cpu" if kwargs.get("device") is None else kwargs["device"])
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return GrowingOnes((args[0], 1), dtype, device, _unreadable)
        return func(*args, **kwargs)


def _count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """torch.arange from one length to another that is a fixed number further."""
    begin, end = args if len(args) == 2 else (None, None)
    if (
        not isinstance(begin, DeviceNumber)
        or not isinstance(end, DeviceNumber)
        or begin.base.data_ptr() != end.base.data_ptr()
    ):
        raise NotCapturable("the model counts up to the cache's length, which grows from step to step")
    counted: torch.Tensor = torch.arange(end.more - begin.more, **kwargs) + _plain(begin)
    return counted


@contextmanager
def lengths_on_device(model: nn.Module, mode: LengthsOnDevice | None) -> Iterator[None]:
    """Run a forward whose cache answers with device numbers; without a mode it computes as ever."""
    warners = [
        module for module in model.modules() if hasattr(module, WARNING) and WARNING not in module.__dict__
    ]
    for module in warners:
        module.__dict__[WARNING] = lambda *args, **kwargs: None
    try:
        with mode or nullcontext():
            yield
    finally:
        for module in warners:
            del module.__dict__[WARNING]


@contextmanager
def lengths_apart() -> Iterator[None]:
    """Run code that does not support device numbers outside their mode: a traced layer."""
    if not isinstance(_get_current_function_mode(), LengthsOnDevice):
        yield
        return
    with _pop_mode_temporarily():
        yield
