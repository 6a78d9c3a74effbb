"""Tensors that exist only if somebody looks: keys and values in their pages, and masks that the pages make needless.

A model hands what the cache returned straight to its attention function, so a view of the pages can travel in the
tensors' place. Whoever computes with it instead (a model with an attention of its own) gets the dense tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from ..memory import StaticBatch, reference

if TYPE_CHECKING:
    from ..memory import Pages
    from .layer import PagedLayer


class NotCapturable(RuntimeError):
    """A forward wants something on the host, or at a size, that another replay would need otherwise."""


class DeviceNumber(torch.Tensor):
    """A number that only the device knows: whatever is computed from it changes from replay to replay, nothing can ask for it."""

    @staticmethod
    def of(number: torch.Tensor) -> DeviceNumber:
        """Look at number [] as one."""
        return number.as_subclass(DeviceNumber)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_READS:
            raise NotCapturable(f"the model asks for the cache's length on the host ({getattr(func, '__name__', func)})")
        # What is computed is an ordinary tensor; only sums with plain numbers are still lengths.
        plain = func(*tree_map(_as_plain, args), **tree_map(_as_plain, kwargs or {}))
        still = func in SUMS and all(isinstance(arg, (cls, int)) for arg in args)
        return cls.of(plain) if still else plain


def _as_plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, DeviceNumber) else value


HOST_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("__bool__", "__int__", "__index__", "__float__", "item", "tolist", "numpy", "__len__", "__format__")
)
SUMS = frozenset(getattr(torch.Tensor, name) for name in ("__add__", "__radd__", "__sub__", "add", "sub"))


class LazyTensor(torch.Tensor):
    """A tensor with a shape and no content; any operation on it makes the content first."""

    _dense: torch.Tensor | None

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *args: Any) -> LazyTensor:
        lazy: LazyTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        lazy._dense = None
        return lazy

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # what torch documents for wrappers

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Torch hands kwargs as None where there are none.
        return func(*tree_map(as_dense, args), **tree_map(as_dense, kwargs or {}))

    def dense(self) -> torch.Tensor:
        """The content, made once."""
        if self._dense is None:
            self._dense = self._make()
        return self._dense

    def _make(self) -> torch.Tensor:
        raise NotImplementedError

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.dense().numpy(force=force)

    def data_ptr(self) -> int:
        return self.dense().data_ptr()


def as_dense(value: Any) -> Any:
    """The content of a lazy tensor; anything else as it is."""
    return value.dense() if isinstance(value, LazyTensor) else value


class LazyPages(LazyTensor):
    """Keys or values [rows, heads, visible columns, dim] of one layer, in their pages.

    `step_tokens` are those of the step that handed it out: where they are all there is, nobody needs to gather them.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        layer: PagedLayer,
        pages: Pages,
        data: torch.Tensor,
        step_tokens: torch.Tensor | None,
    ) -> None:
        self.layer, self.pages, self.data_in_pages, self.step_tokens = layer, pages, data, step_tokens

    @property
    def first(self) -> int:
        """The first column shown."""
        return self.pages.batch.columns - self.shape[2]

    def columns_from(self, first: int) -> torch.Tensor:
        """[rows, heads, columns - first, dim], without a copy where rows lie side by side."""
        if self.step_tokens is not None and first == 0 and self.pages.batch.fresh:
            return self.step_tokens
        return reference.gather(self.data_in_pages, self.pages.batch, first)

    def _make(self) -> torch.Tensor:
        if isinstance(self.pages.batch, StaticBatch):
            raise NotCapturable("the model computes with keys or values itself, and there are more of them at every step")
        self.layer.path = "dense"
        return self.columns_from(self.first).contiguous()


class LazyMask(LazyTensor):
    """A causal or sliding mask [rows, 1, new, columns] that says no more than the pages do.

    `window` is how far back a token sees, None for all the way. `build` makes what stock would have made.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, window: int | None, build: Callable[[], torch.Tensor]
    ) -> None:
        self.window, self.build = window, build

    def _make(self) -> torch.Tensor:
        return self.build()
