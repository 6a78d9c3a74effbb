"""Calls of functions in the mode: only what it computes is seen, and a mode of the caller sees everything."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from families import BY_NAME, build
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged import batch_invariant
from hf_paged.kv.reference import invariant
from hf_paged.model.thread_state import mode_depths


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = numbers(5, 7, 12)


@contextmanager
def counting_seen_operations() -> Iterator[Counter[str]]:
    """How often each operation comes to code of a mode in Python."""
    seen: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "__torch_dispatch__":
            seen[frame.f_locals["func"]._overloadpacket.__name__] += 1

    sys.setprofile(count)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def test_the_mode_sees_only_what_it_computes() -> None:
    """Of a layer's functions it hides those from itself that round once or move numbers: a call in Python takes
    longer than they do.
    """
    model = build(BY_NAME["llama"])
    ids = torch.arange(10, 22)[None]
    with batch_invariant():
        model(ids, use_cache=False)
        with counting_seen_operations() as seen:
            model(ids, use_cache=False)
    layers = model.config.num_hidden_layers
    assert seen["mm"] == 7 * layers + 1
    assert seen["mean"] == 2 * layers + 1
    for name in ("add", "mul", "cat", "neg", "transpose", "rsqrt", "_to_copy", "clone"):
        assert seen[name] <= 2, name


def test_a_mode_of_ones_own_sees_every_operation() -> None:
    """Entered in the block or around it, and the bits are the same."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def work() -> torch.Tensor:
        return (X.float() * 2 + 1).softmax(-1)

    with batch_invariant():
        right = work()
    for outer in (False, True):
        names: list[str] = []
        with Names() if outer else nullcontext(), batch_invariant(), nullcontext() if outer else Names():
            assert torch.equal(work(), right)
        assert names[:2] == ["mul", "add"]


def test_a_function_that_computes_so() -> None:
    """Also where it calls itself: the mode ends with its last call."""
    seen: list[bool] = []

    @batch_invariant()
    def compute(again: bool) -> None:
        if again:
            compute(False)
        seen.append(invariant.get())

    compute(True)
    assert seen == [True, True]
    assert not invariant.get()
    assert mode_depths() == (0, 0)


def test_what_yields_is_not_decorated() -> None:
    """Its caller would compute in the mode, and it would compute without."""

    def generator() -> Iterator[None]:
        yield

    async def coroutine() -> None:
        pass

    async def both() -> AsyncIterator[None]:
        yield

    for function in (generator, coroutine, both):
        with pytest.raises(
            TypeError, match=rf"{function.__name__}.* yields or awaits; enter the mode inside"
        ):
            batch_invariant()(function)
