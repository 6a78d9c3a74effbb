"""The head of a model while a step runs: in float32 where its weight is half, or given some rows alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .patches import ReplacedForward, mark_wrapper, own_forward


class Fp32Head:
    """The head of a model in float32: its input, weight and bias are converted in every forward.

    The converted weight lives for one forward, so it is never older than the model's. In other threads, and
    between steps, the head is the model's own. What the model does after its head (caps, scales) follows the
    head's type.
    """

    def __init__(self, model: nn.Module, wanted: bool) -> None:
        self.model = model
        self.wanted = wanted
        self._replaced: ReplacedForward | None = None
        self._of_rows: ReplacedForward | None = None
        self._thread = 0
        self._calls = 0
        if wanted:
            plain_head(model)

    def put_in(self) -> None:
        """Let forwards of this thread compute the head in float32. The caller holds the memory's lock."""
        self._calls = 0
        head = plain_head(self.model) if self.wanted and self._replaced is None else None
        if head is None:
            return
        stock = head.forward

        @functools.wraps(stock)
        def forward(x: torch.Tensor) -> torch.Tensor:
            if threading.get_ident() != self._thread:
                answer: torch.Tensor = stock(x)
                return answer
            self._calls += 1
            bias = None if head.bias is None else head.bias.float()
            with torch.autocast(x.device.type, enabled=False):
                return functional.linear(x.float(), head.weight.float(), bias)

        mark_wrapper(forward)
        self._thread = threading.get_ident()
        self._replaced = ReplacedForward(head, head.__dict__.get("forward"), forward)
        self._replaced.replace()

    def take_out(self) -> None:
        """Give the model its head back. Twice is once."""
        self._thread = 0
        for replaced in (self._of_rows, self._replaced):
            if replaced is not None:
                replaced.restore()
        self._of_rows = self._replaced = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Compute the head in float32 meanwhile."""
        try:
            self.put_in()
            yield
        finally:
            self.take_out()

    @contextmanager
    def of_rows(self, head: Any, rows: int, wanted: torch.Tensor | None) -> Iterator[Callable[[], bool]]:
        """Let a head, where it is given so many rows in this thread, compute the wanted ones alone, all if
        None. Yields whether it did. What an interrupt leaves of it ends with `take_out`.
        """
        if wanted is None or head is None:
            yield lambda: False
            return
        thread = threading.get_ident()
        stock = head.forward
        calls = []

        @functools.wraps(stock)
        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and len(x) == rows:
                calls.append(rows)
                x = x.index_select(0, wanted)
            return stock(x, *args, **kwargs)

        mark_wrapper(forward)
        replaced = self._of_rows = ReplacedForward(head, head.__dict__.get("forward"), forward)
        try:
            replaced.replace()
            yield lambda: bool(calls)
        finally:
            replaced.restore()
            self._of_rows = None

    def require(self, logits: torch.Tensor) -> None:
        """Raise unless these logits, the last forward's, are the head's in float32."""
        if self._replaced is None:
            return
        name = type(self.model).__name__
        if not self._calls:
            raise ValueError(
                f"lm_head_fp32=True: {name} made logits without calling its head; leave the option out"
            )
        if logits.dtype != torch.float32:
            raise ValueError(
                f"lm_head_fp32=True: {name} rounds logits to {logits.dtype} behind its head; leave the "
                "option out"
            )


def plain_head(model: Any) -> nn.Linear | None:
    """The head of a model; None if it is float32 already. Raise if it is no plain linear layer."""
    name = type(model).__name__
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"lm_head_fp32=True: {name} names no output embeddings; leave the option out")
    kind = type(head)
    if kind.forward is not nn.Linear.forward or own_forward(head) is not None:
        raise ValueError(
            f"lm_head_fp32=True needs a head that is a plain nn.Linear, {name} has "
            f"{kind.__module__}.{kind.__qualname__} "
            "(heads with adapters, quantized and offloaded ones are other classes); leave the option out"
        )
    weight = head.weight
    if type(weight) not in (torch.Tensor, nn.Parameter) or not weight.is_floating_point():
        raise ValueError(
            f"lm_head_fp32=True needs a head with a plain weight, {name} has a {type(weight).__name__} of "
            f"{weight.dtype}; leave the option out"
        )
    return None if weight.dtype == torch.float32 else head
