"""Torch's state of each thread: whether gradients are computed, and the modes that see its operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ..kv.reference import invariant

T = TypeVar("T")
Depths = tuple[int, int]


def mode_depths() -> Depths:
    """How many modes see this thread's function calls, and how many its operations."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def pop_modes(depths: Depths) -> None:
    """Take the modes away that came later than `depths`, also if one interrupt comes meanwhile."""
    functions, operations = depths
    try:
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
    finally:
        while torch._C._len_torch_dispatch_stack() > operations:
            torch._C._pop_torch_dispatch_stack(None)


def restoring(act: Callable[[], T]) -> T:
    """The answer of `act`, after which gradients and modes are as before it, also if Ctrl-C broke it off.

    `with torch.no_grad()` alone leaves gradients off if the interrupt comes in its first or last lines, which
    are written in Python. Here the last thing done is a call of C, which comes before the next interrupt.
    """
    gradients = torch.is_grad_enabled()
    ordered = invariant.get()
    depths = mode_depths()
    try:
        return act()
    finally:
        try:
            invariant.wanted.set(ordered)
        finally:
            try:
                pop_modes(depths)
            finally:
                torch._C._set_grad_enabled(gradients)
