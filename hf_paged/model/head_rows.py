"""The logits of some rows of a step: its head computes those of no others."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .patches import ReplacedForward, mark_wrapper


@contextmanager
def head_of_rows(head: Any, rows: int, wanted: torch.Tensor | None) -> Iterator[Callable[[], bool]]:
    """Let a head, where it is given so many rows in this thread, compute the wanted ones alone, all if None.
    Yields whether it did.
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
    replaced = ReplacedForward(head, head.__dict__.get("forward"), forward)
    try:
        replaced.replace()
        yield lambda: bool(calls)
    finally:
        replaced.restore()
