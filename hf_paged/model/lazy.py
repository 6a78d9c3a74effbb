"""Tensors that are materialised only when read: keys and values in their pages, and masks that the pages make
needless.

A model hands what the cache returned straight to its attention function, so a view of the pages can travel in
the tensors' place. A model that computes with it instead (one with an attention of its own) gets the dense
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch.utils._pytree import tree_map

from ..blocks import LayerKind
from ..kv import Pages, TritonOps
from ..kv.ops import on

Path = Literal["unused", "paged", "dense"]
"""How attention last read a layer: from the pages, or through a dense copy."""
_wrapper: Any = torch.Tensor._make_wrapper_subclass


class NotCapturable(RuntimeError):
    """A forward wants something on the host, or at a size, that another replay would need otherwise."""


class NotFlat(RuntimeError):
    """A forward over several sequences in one row wants keys, values or a mask of a single sequence."""


class LazyTensor(torch.Tensor):
    """A tensor with a shape and no content; any operation on it calls `make` for the content first."""

    _dense: torch.Tensor | None = None

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *args: Any) -> Any:
        return _wrapper(cls, shape, dtype=dtype, device=device)

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, make: Callable[[], torch.Tensor]
    ) -> None:
        self.make = make

    # What torch documents for wrappers.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}  # torch hands None where there are none
        # Autograd takes composite operations apart, and some then do nothing (`to` the same dtype). Below it
        # and in inference mode they come here whole.
        made = func.decompose(*args, **named)
        if made is not NotImplemented:
            return made
        return func(*tree_map(as_dense, args), **tree_map(as_dense, named))

    def dense(self) -> torch.Tensor:
        """The content, made once."""
        if self._dense is None:
            self._dense = self._make()
        return self._dense

    def _make(self) -> torch.Tensor:
        return self.make()

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


READ_ONLY = (
    "keys and values of a paged cache cannot be changed in place: their blocks may belong to other rows and "
    "calls too; clone them, or use transformers' own cache"
)


class LayerOfPages(Protocol):
    """The cache layer of lazy pages, as far as they read and note in it."""

    kind: LayerKind
    path: Path

    @property
    def length(self) -> Any:
        """The visible columns as a number on the device; None where the host knows them."""


class LazyPages(LazyTensor):
    """Keys or values [rows, heads, visible columns, dim] of one layer, in their pages.

    `step_tokens` are those of the step that returned it: where they are all there is, nothing has to be
    gathered. In a captured step the visible columns grow from replay to replay, so there the shape holds a
    number on the device.
    """

    layer: LayerOfPages
    pages: Pages
    data_in_pages: torch.Tensor
    step_tokens: torch.Tensor | None
    columns: int
    """The visible columns, as the host knows them."""

    @classmethod
    def of(
        cls, layer: LayerOfPages, pages: Pages, data: torch.Tensor, columns: int, new: torch.Tensor | None
    ) -> LazyPages:
        """The last `columns` columns of `data`, the keys or the values of `pages`."""
        _, heads, dim = data.shape
        shape = (pages.batch.rows, heads, columns, dim)
        # What cls(...) would do, two functions later; every layer of every step makes two.
        made: LazyPages = _wrapper(cls, shape, dtype=data.dtype, device=data.device)
        made.layer = layer
        made.pages = pages
        made.data_in_pages = data
        made.step_tokens = new
        made.columns = columns
        return made

    @property
    def shape(self) -> Any:  # type: ignore[override]
        """[rows, heads, visible columns, dim]"""
        known = super().shape
        return known if self.layer.length is None else (*known[:2], self.layer.length, known[3])

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one number of it."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def first(self) -> int:
        """The first column shown."""
        return self.pages.batch.columns - self.columns

    def columns_from(self, first: int) -> torch.Tensor:
        """[rows, heads, columns - first, dim], without a copy where rows lie side by side."""
        if self.step_tokens is not None and first == 0 and self.pages.batch.fresh:
            return self.step_tokens
        return self.pages.ops.gather(self.data_in_pages, self.pages.batch, first)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise RuntimeError(READ_ONLY)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            given = (*args, *(kwargs or {}).values())
            written = (
                value
                for argument, value in zip(func._schema.arguments, given, strict=False)
                if argument.is_write
            )
            if any(isinstance(value, LazyPages) for value in written):
                raise RuntimeError(READ_ONLY)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _make(self) -> torch.Tensor:
        if self.pages.batch.captured:
            raise NotCapturable(
                "the model computes with keys or values itself, and there are more of them at every step"
            )
        if self.pages.batch.packed:
            raise NotFlat("the model computes with keys or values itself")
        if self.step_tokens is not None:  # else the reader of the cache is no attention function
            self.layer.path = "dense"
        return self.columns_from(self.first).contiguous()


class LazyMask(LazyTensor):
    """A causal or sliding mask [rows, 1, new, columns] that the pages imply already.

    `window` is how far back a token sees, None for all the way. `build` makes the mask, `as_stock` what stock
    passes to its layers in its place: often nothing.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        window: int | None,
        build: Callable[[], torch.Tensor],
        as_stock: Callable[[], torch.Tensor | None] | None = None,
    ) -> None:
        self.make = build
        self.window = window
        self.as_stock = as_stock or build

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten._to_copy:
            mask = args[0]
            named = kwargs or {}
            device = named.get("device")
            # A layer on another device gets the mask moved there.
            if device is not None and named.get("dtype") in (None, mask.dtype):
                return mask.on(torch.device(device))
        if func is torch.ops.aten.alias.default:
            return args[0].on(args[0].device)  # all of it: Gemma 4's where all tokens' logits are wanted
        return super().__torch_dispatch__(func, types, args, kwargs)

    def on(self, device: torch.device) -> LazyMask:
        """The same mask on another device."""

        def as_stock() -> torch.Tensor | None:
            stock = self.as_stock()
            return None if stock is None else stock.to(device)

        return LazyMask(
            self.shape, self.dtype, device, self.window, lambda: self.dense().to(device), as_stock
        )


class Rotation:
    """Queries and keys before rotation: a layer that stores the keys rotates both in one launch."""

    def __init__(self, kernels: Any, *inputs: torch.Tensor) -> None:
        self.kernels = kernels
        self.inputs = inputs
        self.query: torch.Tensor | None = None
        self.key: torch.Tensor | None = None

    def lazy(self) -> tuple[LazyRotated, LazyRotated]:
        """Query and key as they will be: [rows, heads, new, dim]."""
        return LazyRotated.of(self, 0), LazyRotated.of(self, 1)

    def fits(self, pages: Pages, value: torch.Tensor) -> bool:
        """True if the keys can be written into these pages as they are."""
        return (
            isinstance(pages.ops, TritonOps)
            and self.inputs[1].dtype == pages.keys.dtype == value.dtype
            and value.stride(3) == 1
        )

    def write(self, pages: Pages, value: torch.Tensor) -> None:
        """Rotate both, and store the key with the step's value."""
        assert isinstance(pages.ops, TritonOps)
        query, key, cos, sin = self.inputs
        self.query = pages.ops.rotary_write(pages, query, key, cos, sin, value)

    def rotated(self, which: int) -> torch.Tensor:
        """Query or key, if it is needed without being stored."""
        done = (self.query, self.key)[which]
        if done is None:
            with on(self.inputs[0].device):
                self.query, self.key = self.kernels.rotary(*self.inputs)
        made = (self.query, self.key)[which]
        assert made is not None
        return made


class LazyRotated(LazyTensor):
    """A query or a key that has not been rotated yet."""

    rotation: Rotation

    @classmethod
    def of(cls, rotation: Rotation, which: int) -> LazyRotated:
        """Queries are number 0, keys number 1."""
        source = rotation.inputs[which]
        made = cls(source.shape, source.dtype, source.device, partial(rotation.rotated, which))
        made.rotation = rotation
        return made
