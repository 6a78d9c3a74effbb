"""The mode itself: what enters and leaves it, and which models it can serve.

Two modes of torch replace what sums or rounds in an order of the batch's: one the attention that models call,
one the products, sums and functions below autograd. A training forward in the same modes gives the bits of a
decoding step. An operation without a fixed order is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import cache
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...kv.ops import invariant_kernels
from ...kv.reference import invariant
from ..switch import decoder_configs, modules_of, original_implementation
from ..thread_state import Depths, mode_depths, pop_modes
from .functions import FunctionCalls
from .known import NotInvariant, kernels_for
from .operations import Operations

F = TypeVar("F", bound=Callable[..., Any])


class batch_invariant(threading.local, ContextDecorator):
    """Compute so that a token's logits depend on its own sequence alone: not on the sequences beside it, on
    padding, chunks, cached prefixes or preemption. A forward that trains gives the bits of one that samples.

    with hf_paged.batch_invariant():
        model.generate(**inputs, cache_implementation="paged")
        loss(model(**inputs).logits).backward()
    """

    def __init__(self) -> None:
        self._blocks: list[Depths | None] = []
        """The modes before each block that this thread is in; None if the block found the mode on."""

    def __call__(self, function: F) -> F:
        if isgeneratorfunction(function) or iscoroutinefunction(function) or isasyncgenfunction(function):
            raise TypeError(
                f"batch_invariant() decorates functions that compute and return, and {function!r} yields or "
                "awaits; enter the mode inside it"
            )
        return super().__call__(function)

    def _recreate_cm(self) -> batch_invariant:  # of a decorated function, for each of its calls
        return batch_invariant()

    def __enter__(self) -> None:
        before = None
        if not invariant.get():
            functions, operations = _modes()
            above, below = mode_depths()
            # Torch steps out of a mode to call it, and back in later if an interrupt came meanwhile.
            while above and torch._C._get_function_stack_at(above - 1) is functions:
                above -= 1
            before = (above, below)
            try:
                torch._C._push_on_torch_function_stack(functions)
                operations.__enter__()  # type: ignore[no-untyped-call]  # torch's own
                invariant.wanted.set(True)
                invariant.entered = functions.entered = True
            except BaseException:
                _leave(before)
                raise
        self._blocks += [before]  # no call: an interrupt comes after one

    def __exit__(self, error: object, *_: object) -> None:
        *self._blocks, before = self._blocks
        there = False
        try:
            there = _leave(before)
        finally:
            _leave(before)  # again, as an interrupt may have broken it off
        if not there and error is None:
            raise NotInvariant(
                "another task or generator of this thread left its batch_invariant() first, so the rest of "
                "this block was computed without it; enter the mode once around both, or do not await or "
                "yield in it"
            )


def _leave(before: Depths | None) -> bool:
    """End a block that has entered the modes; whether the mode was still there."""
    if before is None:
        return invariant.get()
    functions, operations = _modes()
    there = mode_depths()[1] > before[1]
    invariant.wanted.set(False)
    try:
        if there:
            operations.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    finally:
        pop_modes(before)
    # Another task may be in it.
    invariant.entered = functions.entered = operations in _get_current_dispatch_mode_stack()
    return there


_of_thread = threading.local()
"""The modes of each thread, which know what they have looked up from step to step."""
_has_cuda = cache(torch.cuda.is_available)  # it is asked in every step of an engine


def _modes() -> tuple[FunctionCalls, Operations]:
    """The modes of this thread."""
    if not _has_cuda():
        invariant_kernels("cpu")  # an error that comes now is a clear one
    known: tuple[FunctionCalls, Operations] | None = getattr(_of_thread, "modes", None)
    if known is None:
        functions = FunctionCalls()
        known = _of_thread.modes = (functions, Operations(functions))
    return known


def require_invariant(model: Any) -> None:
    """Raise NotInvariant unless a model is on a device that has fixed orders, with attention that has the
    same bits on pages and in pieces.
    """
    _require_no_relative_biases(model)
    for parameter in model.parameters():
        kernels_for(parameter)
    for config in decoder_configs(modules_of(model)) or [model.config]:
        setting = original_implementation(config)
        if setting not in ("sdpa", "eager"):
            raise NotInvariant(
                f"batch_invariant=True needs attention by 'sdpa' or 'eager', {type(model).__name__} has "
                f"{setting!r}; call model.set_attn_implementation('sdpa'), or leave it out"
            )


def require_same_in_pieces(model: Any) -> None:
    """Raise NotInvariant for a model that by construction rounds a sequence in pieces otherwise."""
    if invariant.get():
        _require_no_relative_biases(model)


def _require_no_relative_biases(model: Any) -> None:
    if any(type(module).__name__ == "MptAttention" for module in modules_of(model)):
        raise NotInvariant(
            f"{type(model).__name__} adds biases relative to the last token, so tokens one by one round "
            "otherwise than in a forward of all; compute it outside of batch_invariant()"
        )


def require_whole_sequences(model: Any) -> None:
    """Raise NotInvariant if stock's cache would forget tokens whose number decides an order: on a CUDA
    device a query's sums begin with the first token of its sequence.
    """
    if not invariant.get() or model.device.type != "cuda":
        return
    for config in decoder_configs(modules_of(model)) or [model.config]:
        kinds = set(getattr(config, "layer_types", None) or ())
        if not kinds <= {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
            raise NotInvariant(
                f"batch_invariant() on {model.device} needs a cache of whole sequences, and stock's keeps a "
                f"window of them for {type(model).__name__}; give generate() cache_implementation='paged'"
            )
