"""A forward in which each token has its own adapter, or none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import nn

from ...kv.upload import upload
from ..lora import Adapter, add_parts
from ..patches import ReplacedForward, mark_wrapper
from ..peft_layers import LoraLayers
from ..peft_parts import base_of, inner_of
from ..ranks.tensor_parallel import SUMS
from ..streams import side_stream
from .table import AdapterTable

MOST_HELD = 3
"""Layers whose outputs one kernel writes to."""
OURS = "hf_paged_adds"
"""The mark of a layer's forward that adds what adapters add."""
PEFT_KEYWORDS = ("adapter_names", "alora_offsets")
"""Keywords of peft's hooks for a LoRA layer."""


class Inapplicable(RuntimeError):
    """A layer was given something else than the tokens of the step, so it is not known which is whose."""


class AdapterBatch:
    """The adapters of a forward's tokens.

    Either all tokens have one adapter (`only`), or each has the slot that `index` says: one for each row
    [rows] of what a layer is given, or one for each token of a single row.
    """

    def __init__(
        self,
        table: AdapterTable,
        index: torch.Tensor | Sequence[int],
        last: torch.Tensor | None = None,
    ) -> None:
        """index: slots, int32 on the device if it is a tensor; -1 for none. last: the places of the tokens
        that the last layer is given, if it is not given all.
        """
        self.table = table
        self.last = last
        self.only: Adapter | None = None
        self._slots = None if isinstance(index, torch.Tensor) else list(index)
        """The same on the host, where the host knows it."""
        self._index = index if isinstance(index, torch.Tensor) else None
        self._count = len(index)
        self._plans: dict[Any, Any] = {}
        self._rows: dict[Any, list[tuple[int, torch.Tensor]]] = {}
        self._shrunk: tuple[torch.Tensor, int, torch.Tensor, Any] | None = None
        """The last layer's input, the number of the first layer that shares it, and their products."""
        captured = self._slots is None and table.device.type == "cuda"
        self._beside = side_stream(table.device, "first products") if captured else None
        self._waits = False
        """True if the other stream has work that this one has not waited for."""
        self._held: list[tuple[torch.Tensor, torch.Tensor, int, Any, Any]] = []
        """Outputs that are still to be written, all of layers with one input."""
        self._together = -1
        """The last of layers whose outputs are read together."""
        self._met: tuple[torch.Tensor, int, int] | None = None
        """An input, and the numbers of the first and the last layer that were given it so far."""

    @classmethod
    def of_one(cls, table: AdapterTable, adapter: Adapter) -> AdapterBatch:
        """A forward all of whose tokens have one adapter, whatever its layers are given."""
        made = cls(table, ())
        made.only = adapter
        return made

    def begin(self, module: nn.Module, x: torch.Tensor) -> None:
        """A layer is about to compute its output for x. In a captured step the adapters' first products are
        computed beside that, on another stream.
        """
        if self._beside is None:
            return
        number = self.table.layers.get(module)
        known = self._shrunk
        if number is None or not x.is_floating_point():
            return
        if known is not None and known[0] is x and number < known[1] + known[3].layers:
            return
        plan = self._plan(self._form(x.shape))
        self._beside.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._beside):
            self._shrink(number, x, plan)
        self._waits = True

    def add(self, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """A layer's output y for x, with what the adapters of its tokens add; y may be written to."""
        if self.only is not None:
            return add_parts(module, y, x, self.only.layers.get(module, ()))
        own = y.shape[-1]
        y = self.table.vocabularies.widened(module, y)
        flat = y.reshape(-1, y.shape[-1])  # a part of a wider product, of which rows lie apart
        y = (flat if flat.stride(1) == 1 else flat.contiguous()).view(y.shape)
        if self.table.kernels is not None:
            y = self._add_in_kernels(module, x, y, own)
        return self._add_in_torch(module, x, y, own)

    def add_at_once(self, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The same for a part of an output, which is read as soon as this returns: ranks sum theirs."""
        found = self.add(module, x, y)
        self.flush()
        return found

    # ---- plain torch

    def _add_in_torch(self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, own: int) -> torch.Tensor:
        """y with what the adapters of its tokens do to it that no kernel computes. own: the columns that the
        module itself has.
        """
        parts = {slot: each[module] for slot, each in enumerate(self.table.in_torch) if module in each}
        if not parts:
            return y
        flat_x = x.reshape(-1, *x.shape[y.ndim - 1 :])  # of an embedding ids, without a dimension of theirs
        flat_y = y.view(-1, y.shape[-1])
        for slot, rows in self._rows_of(self._form(y.shape)):
            if slot in parts:
                rows = rows.to(y.device)
                found = add_parts(module, flat_y[rows][:, :own], flat_x[rows], parts[slot])
                flat_y[rows, : found.shape[-1]] = found
        return y

    def _rows_of(self, form: tuple[str, int]) -> list[tuple[int, torch.Tensor]]:
        """The tokens of each slot, once in a forward for inputs of one form."""
        if form not in self._rows:
            if self._slots is None:
                raise self._inapplicable("adapters in a captured step need the Triton kernels")
            slots = self._spread(form)
            self._rows[form] = [(slot, self._places(slots, slot)) for slot in sorted(set(slots) - {-1})]
        return self._rows[form]

    def _places(self, slots: list[int], slot: int) -> torch.Tensor:
        return upload([i for i, each in enumerate(slots) if each == slot], self.table.device)

    def _spread(self, form: tuple[str, int]) -> list[int]:
        """The slot of every token of an input."""
        assert self._slots is not None
        kind, count = form
        if kind == "last":
            assert self.last is not None
            return [self._slots[place] for place in self.last.tolist()]
        return [slot for slot in self._slots for _ in range(count)]

    # ---- kernels

    def _add_in_kernels(self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, own: int) -> torch.Tensor:
        number = self.table.layers.get(module)
        if number is not None:
            self._add_products(module, number, x, y[..., :own])
        number = self.table.replaced.get(module)
        if number is not None:
            self._replace_rows(number, x, y)
        return y

    def _replace_rows(self, number: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Let tokens have rows of their own of a module's weight: embeddings, or logits."""
        form = self._form(y.shape)
        out = y.view(-1, y.shape[-1])
        kernels, table = self.table.kernels, self.table.rows
        if x.is_floating_point():
            kernels.slot_product(out, x.reshape(-1, x.shape[-1]), self._plan(form), table, number)
        else:
            kernels.slot_embed(out, x.reshape(-1), self._index_of(form), table, number)

    def _add_products(self, module: nn.Module, number: int, x: torch.Tensor, y: torch.Tensor) -> None:
        plan = self._plan(self._form(y.shape))
        if x.is_floating_point():
            first, shrunk, weights = self._shrink(number, x, plan)
        else:
            first, shrunk, weights = self._gather(module, number, x, plan)
        last = max(self.table.joint.get(number, number), self._together)
        if module._forward_hooks:
            last = number  # they see the output before any other layer runs
        if self._held and (self._held[-1][0] is not shrunk or len(self._held) == MOST_HELD):
            self.flush()
        self._held.append((shrunk, y.view(-1, y.shape[-1]), number - first, weights, plan))
        if number >= min(last, first + weights.layers - 1):
            self.flush()

    def flush(self) -> None:
        """Write what outputs of layers that are read together still lack."""
        held = self._held
        self._held = []
        if held:
            if self._waits and self._beside is not None:
                torch.cuda.current_stream(self.table.device).wait_stream(self._beside)
                self._waits = False
            shrunk, _, first, weights, plan = held[0]
            self.table.kernels.lora_expand([y for _, y, *_ in held], shrunk, weights, plan, first=first)

    def _shrink(self, number: int, x: torch.Tensor, plan: Any) -> tuple[int, torch.Tensor, Any]:
        """The first products of the layers that share an input, once for all of them."""
        known = self._shrunk
        if known is not None and known[0] is x and known[1] <= number < known[1] + known[3].layers:
            return known[1], known[2], known[3]
        self._meet(number, x)
        weights = self.table.weights.part(number, self.table.groups.get(number, 1))
        flat = x.reshape(-1, x.shape[-1])
        shrunk = self.table.kernels.lora_shrink(flat, weights, plan)
        self._shrunk = x, number, shrunk, weights
        return number, shrunk, weights

    def _gather(
        self, module: nn.Module, number: int, ids: torch.Tensor, plan: Any
    ) -> tuple[int, torch.Tensor, Any]:
        """The first products of an embedding: columns by id."""
        weights = self.table.weights.part(number, 1)
        count = base_of(module).num_embeddings
        return number, self.table.kernels.lora_gather(ids.reshape(-1), weights, plan, count), weights

    def _meet(self, number: int, x: torch.Tensor) -> None:
        """Note which layers share an input, for the next forward."""
        met = self._met
        if met is not None and met[0] is x and number == met[2] + 1:
            self._met = x, met[1], number
            self.table.groups[met[1]] = number - met[1] + 1
        else:
            self._met = x, number, number

    def _plan(self, form: tuple[str, int]) -> Any:
        if form not in self._plans:
            index = self._index_of(form)
            plan = self.table.kernels.AdapterPlan(len(index), len(self.table.slots), index.device)
            plan.update(index)
            self._plans[form] = plan
        return self._plans[form]

    def _index_of(self, form: tuple[str, int]) -> torch.Tensor:
        kind, count = form
        if self._index is None:
            assert self._slots is not None
            self._index = upload(self._slots, self.table.device, torch.int32)
        if kind == "last":
            return self._index[self.last].contiguous()
        return self._index if count == 1 else self._index.repeat_interleave(count)

    def _form(self, shape: torch.Size) -> tuple[str, int]:
        """How the tokens of an input or output are this forward's: so many of each row, those of one row, or
        the last.
        """
        tokens = shape[:-1].numel()
        if shape[0] == self._count:
            return "rows", tokens // self._count
        if len(shape) > 2 and shape[0] == 1:
            if shape[1] == self._count:  # with so many heads each
                return "rows", tokens // self._count
            if self.last is not None and tokens == len(self.last):
                return "last", tokens
        raise self._inapplicable(
            f"a layer with adapters was given {list(shape)} in a forward of {self._count} rows or tokens"
        )

    def _inapplicable(self, why_not: str) -> Inapplicable:
        """The error of a layer that cannot tell the adapters of its tokens; the table notes why."""
        self.table.why_not = why_not
        return Inapplicable(why_not)


@contextmanager
def read_together(last: nn.Module) -> Iterator[None]:
    """Around layers with one input, whose outputs are not read before the `last` one is there."""
    batch = _applied.get()
    if batch is None:
        yield
        return
    batch._together = batch.table.layers.get(last, -1)
    try:
        yield
    finally:
        batch._together = -1
        batch.flush()


_applied: ContextVar[AdapterBatch | None] = ContextVar("hf_paged_adapters", default=None)
_inside: ContextVar[bool] = ContextVar("hf_paged_inside_adapters", default=False)


@contextmanager
def applied(
    modules: Collection[nn.Module], batch: AdapterBatch | None, others: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Let layers add what the adapters of a batch add, in this thread, instead of the adapters that are
    active in peft's; None adds nothing. others: modules of peft's that compute what they are wrapped around.

    The caller holds the lock of the model's memory: no other forward of ours runs meanwhile.
    """
    replaced: list[ReplacedForward] = []
    outer = _applied.get(), _inside.get()
    try:
        for made, several in ((_replacement, modules), (_passing, others)):
            for module in several:
                own = module.__dict__.get("forward")
                if not hasattr(own, OURS):
                    replaced.append(ReplacedForward(module, own, made(module, own)))
                    replaced[-1].replace()
        _applied.set(batch)
        _inside.set(True)
        yield
        assert batch is None or not batch._held, "an output of a layer with adapters was not finished"
    finally:
        try:
            _put_back(replaced, outer)
        finally:
            # Again, if an interrupt has broken it off; else there is nothing left to do.
            _put_back(replaced, outer)


def alone(model: nn.Module) -> AbstractContextManager[None]:
    """Let a model compute without the adapters that only peft's own modules compute, where it can."""
    lora = LoraLayers.of(model)
    others = [each for each in lora.tuners if each not in lora.layers] if lora.beside else []
    return applied(lora.layers if lora.beside else (), None, others)


def _put_back(replaced: Sequence[ReplacedForward], outer: tuple[AdapterBatch | None, bool]) -> None:
    """Give layers their own forwards back."""
    _applied.set(outer[0])
    _inside.set(outer[1])
    for each in replaced:
        each.restore()


def _replacement(module: nn.Module, own: Any) -> Callable[..., Any]:
    """A forward of a layer that adds what the running batch says. Other threads get the layer's own, which
    may be the user's.
    """
    stock = own or type(module).forward.__get__(module)
    inner = inner_of(module)
    base: Any = stock if inner is None else inner
    summing = getattr(own if base is stock else base.__dict__.get("forward"), SUMS, None)

    @functools.wraps(stock)
    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _inside.get():
            return stock(x, *args, **kwargs)
        for name in PEFT_KEYWORDS:
            kwargs.pop(name, None)
        batch = _applied.get()
        if batch is not None:
            batch.begin(module, x)
        if batch is not None and summing is not None:
            return summing(x, lambda part: batch.add_at_once(module, x, part))
        if batch is None:
            return base(x, *args, **kwargs)
        y = base(batch.table.vocabularies.known_ids(module, x), *args, **kwargs)
        return batch.add(module, x, y)

    return _marked(forward)


def _passing(module: nn.Module, own: Any) -> Callable[..., Any]:
    """A forward of one of peft's modules that computes without it."""
    stock = own or type(module).forward.__get__(module)
    base = inner_of(module)

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not _inside.get():
            return stock(*args, **kwargs)
        for name in PEFT_KEYWORDS:
            kwargs.pop(name, None)
        return base(*args, **kwargs)

    return _marked(forward)


def _marked(forward: Any) -> Callable[..., Any]:
    mark_wrapper(forward)
    setattr(forward, OURS, True)
    return cast(Callable[..., Any], forward)
