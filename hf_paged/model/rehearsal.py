"""Record a forward once, to replay it without Python: what may be recorded, and how."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .lazy import LazyTensor, NotCapturable
from .streams import side_stream
from .weights_digest import PLAIN_TENSORS, address_of, memory_of_parts, wraps

aten = torch.ops.aten
WAITS = frozenset(
    getattr(aten, name)
    for name in (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "equal",
        "bincount",
    )
)
"""Operations that the host waits for, or whose answer has a size that depends on content."""
BY_INDEX = frozenset({aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_})
MOVES = frozenset({aten._to_copy, aten.copy_})


class Rehearsal(TorchDispatchMode):
    """Run a step once before it is captured, and refuse what a replay would silently get wrong.

    That is every operation that makes the host wait, every random draw, every tensor that is neither a weight
    nor an input nor made in the step (it may be gone, or hold another value, at the next replay), and tensors
    on other devices than the graph's: a kernel would keep such a tensor's number forever.
    """

    def __init__(self, devices: Sequence[torch.device], known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elsewhere: set[int] = set()
        self.known: set[int] = set()
        for tensor in known:
            (self.known if tensor.device in devices else self.elsewhere).add(address_of(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*_tensors(args), *_tensors(kwargs.values())]
        if _draws(func) and (func is not aten.dropout.default or args[2]):  # in inference mode it comes here
            raise NotCapturable(f"{func} draws at random")
        if _waits(func, args, kwargs, given):
            raise NotCapturable(f"{func} makes the host wait for the device")
        for tensor in given:
            if not tensor.numel():
                continue
            if address_of(tensor) in self.elsewhere:
                raise NotCapturable(f"{func} reads a tensor {list(tensor.shape)} on {tensor.device}")
            if address_of(tensor) not in self.known:
                raise NotCapturable(
                    f"{func} reads a tensor {list(tensor.shape)} that is neither a weight nor an input"
                )
        answer = func(*args, **kwargs)
        self.known.update(map(address_of, _tensors((answer,))))
        return answer


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments and in their lists; torch's own walk is far slower."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value) not in PLAIN_TENSORS and wraps(value):
                yield from memory_of_parts([value])
            elif not isinstance(value, LazyTensor):
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


@functools.cache
def _draws(func: Any) -> bool:
    # Attention's may have dropout.
    return torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func)


def _waits(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> bool:
    """True if the host needs a result of the device before it can continue."""
    packet = func.overloadpacket
    if packet in WAITS:
        return True
    if packet in BY_INDEX:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if packet in MOVES:
        devices = {x.device for x in given} | (
            {torch.device(kwargs["device"])} if kwargs.get("device") is not None else set()
        )
        return len({device.type for device in devices}) > 1
    return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None


CAPTURE = "capture"
"""The use of the stream on which a device's part of a step is captured."""


def cuda_graph(
    step: Callable[[], Any], pools: Sequence[Any], devices: Sequence[torch.device]
) -> tuple[Callable[[], None], Any]:
    """Capture `step`, which computes on these devices: how to replay it, and the tensors in which it answers
    every time. The graph is the first device's, and what the others do in the step is part of it.

    pools: where each device has its memory, as `graph_memory` makes them.
    """
    graph = torch.cuda.CUDAGraph()
    device, *others = devices
    side = side_stream(device, CAPTURE)
    main = torch.cuda.current_stream(device)
    side.wait_stream(main)
    collects = gc.isenabled()
    gc.disable()  # a finalizer must not free device memory in the middle
    try:
        with contextlib.ExitStack() as entered:
            for each, pool in zip(others, pools[1:], strict=True):
                side_stream(each, CAPTURE).wait_stream(torch.cuda.current_stream(each))
                entered.enter_context(torch.cuda.stream(side_stream(each, CAPTURE)))
                entered.enter_context(torch.cuda.use_mem_pool(pool, each))
            entered.enter_context(torch.cuda.device(device))
            entered.enter_context(torch.cuda.stream(side))
            # Other threads may continue to use the device.
            graph.capture_begin(pool=pools[0], capture_error_mode="thread_local")
            try:
                for each in others:
                    side_stream(each, CAPTURE).wait_stream(side)
                answer = step()
                for each in others:
                    side.wait_stream(side_stream(each, CAPTURE))
            except BaseException:
                _give_up(graph, device)
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
        main.wait_stream(side)
    return partial(_replay, graph, device, others) if others else graph.replay, answer


def _replay(graph: torch.cuda.CUDAGraph, device: torch.device, others: Sequence[torch.device]) -> None:
    """Replay a graph of several devices in the order of what else each of them does."""
    main = torch.cuda.current_stream(device)
    for each in others:
        main.wait_stream(torch.cuda.current_stream(each))
    with torch.cuda.device(device):
        graph.replay()
    for each in others:
        torch.cuda.current_stream(each).wait_stream(main)


def graph_memory(devices: Sequence[torch.device]) -> list[Any]:
    """Where captured steps on these devices have their memory, for `cuda_graph`."""
    if devices[0].type != "cuda":
        return [None] * len(devices)
    pools: list[Any] = [torch.cuda.graph_pool_handle()]
    for each in devices[1:]:
        with torch.cuda.device(each):
            pools.append(torch.cuda.MemPool())
    return pools


def _give_up(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    """End a capture that failed. Torch then still treats its random generator as captured; an empty capture
    resets that.
    """
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError), torch.cuda.stream(side_stream(device, CAPTURE)):
        empty = torch.cuda.CUDAGraph()
        empty.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, dtype=torch.float32, device=device)
        empty.capture_end()


Recorder = Callable[
    [Callable[[], Any], Sequence[Any], Sequence[torch.device]], tuple[Callable[[], None], Any]
]
RECORDERS: dict[str, Recorder] = {"cuda": cuda_graph}
"""For each type of device how a step is recorded there."""


def can_record(devices: Iterable[torch.device]) -> bool:
    """True if a step that reads pages on these devices can be recorded on one of them."""
    return any(device.type in RECORDERS for device in devices)
