"""The mode itself: what enters and leaves it, and which models it can serve.

Two modes of torch replace what sums or rounds in an order of the batch's: one the attention that models call,
one the products, sums and functions below autograd. A training forward in the same modes gives the bits of a
decoding step. An operation without a fixed order is refused by name.
"""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from functools import cache
from typing import Any

import torch

from ...kv.ops import invariant_kernels
from ...kv.reference import invariant
from ..switch import decoder_configs, original_implementation
from ..thread_state import mode_depths, pop_modes
from .functions import FunctionCalls
from .known import NotInvariant, kernels_for
from .operations import Operations


class batch_invariant(ContextDecorator):
    """Compute so that a token's logits depend on its own sequence alone: not on the sequences beside it, on
    padding, chunks, cached prefixes or preemption. A forward that trains gives the bits of one that samples.

    with hf_paged.batch_invariant():
        model.generate(**inputs, cache_implementation="paged")
        loss(model(**inputs).logits).backward()
    """

    def _recreate_cm(self) -> batch_invariant:  # of a decorated function, for each of its calls
        return batch_invariant()

    def __enter__(self) -> None:
        self._operations: Operations | None = None
        if invariant.get():
            return
        functions, self._operations = _modes()
        above, below = mode_depths()
        # Torch steps out of a mode to call it, and back in later if an interrupt came meanwhile.
        while above and torch._C._get_function_stack_at(above - 1) is functions:
            above -= 1
        self._before = above, below
        functions.entered = self._operations.entered = True
        # Torch has no types for these.
        functions.__enter__()  # type: ignore[no-untyped-call]
        self._operations.__enter__()  # type: ignore[no-untyped-call]
        invariant.set(True)  # last: an interrupt leaves modes that do nothing

    def __exit__(self, error: object, *_: object) -> None:
        if self._operations is None:
            return
        invariant.set(False)
        self._operations.entered = self._operations.functions.entered = False
        there = mode_depths()[1] > self._before[1]
        try:
            if there:
                self._operations.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        finally:
            pop_modes(self._before)
        if not there and error is None:
            raise NotInvariant(
                "another task of this thread left its batch_invariant() first, so the rest of this block was "
                "computed without it; enter the mode once around both, or do not await in it"
            )


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
    same bits on pages.
    """
    for parameter in model.parameters():
        kernels_for(parameter)
    for config in decoder_configs(model) or [model.config]:
        setting = original_implementation(config)
        if setting not in ("sdpa", "eager"):
            raise NotInvariant(
                f"batch_invariant=True needs attention by 'sdpa' or 'eager', {type(model).__name__} has "
                f"{setting!r}; call model.set_attn_implementation('sdpa'), or leave it out"
            )


def require_whole_sequences(model: Any) -> None:
    """Raise NotInvariant if stock's cache would forget tokens whose number decides an order: on a CUDA
    device a query's sums begin with the first token of its sequence.
    """
    if not invariant.get() or model.device.type != "cuda":
        return
    for config in decoder_configs(model) or [model.config]:
        kinds = set(getattr(config, "layer_types", None) or ())
        if not kinds <= {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
            raise NotInvariant(
                f"batch_invariant() on {model.device} needs a cache of whole sequences, and stock's keeps a "
                f"window of them for {type(model).__name__}; give generate() cache_implementation='paged'"
            )
