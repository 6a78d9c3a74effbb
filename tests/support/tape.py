"""A CUDA graph for CPUs: every operation of a step is noted with its very tensors, and a replay does the same
to them.

Like a graph, it knows nothing of Python: a number that the host put in stays in, and tensors are reused from
replay to replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.model.lazy import LazyTensor


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        """Operations, their arguments, and the tensors that they made anew."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        answer = func(*args, **kwargs)
        given = [x for x in _leaves([args, kwargs]) if isinstance(x, torch.Tensor)]
        if any(isinstance(x, LazyTensor) for x in given):
            return answer  # nothing was computed
        places = {x.untyped_storage().data_ptr() for x in given}
        made = [x for x in _leaves(answer) if isinstance(x, torch.Tensor)]
        views = any(x.untyped_storage().data_ptr() in places for x in made)
        if (
            not views or func._schema.is_mutable or func.namespace == "c10d"
        ):  # collectives write without saying so
            self.noted.append((func, args, kwargs, [] if views else made))
        return answer

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, made in self.noted:
                leaves = _leaves(func(*args, **kwargs))
                _wait(leaves)
                if made:
                    again = [x for x in leaves if isinstance(x, torch.Tensor)]
                    for old, new in zip(made, again, strict=True):
                        old.copy_(new)


def _leaves(tree: Any) -> list[Any]:
    """The tensors in lists and dicts: torch's own function takes longer than the operations of a step."""
    if isinstance(tree, list | tuple):
        return [leaf for each in tree for leaf in _leaves(each)]
    return _leaves(list(tree.values())) if isinstance(tree, dict) else [tree]


def _wait(leaves: list[Any]) -> None:
    """Wait for collectives: on a CPU threads carry them out, on a device the stream does."""
    for each in leaves:
        if isinstance(each, torch.ScriptObject):
            torch.distributed.Work.unbox(each).wait()


def record(step: Callable[[], Any], pools: Any, devices: Any) -> tuple[Callable[[], None], Any]:
    """The recorder that `RECORDERS` holds for a device."""
    tape = Tape()
    # A graph's tensors may be written at any time; on a CPU those of inference mode may not.
    with torch.inference_mode(False), torch.no_grad(), tape:
        answer = step()
    return tape.replay, answer


def rerun(step: Callable[[], Any], pools: Any, devices: Any) -> tuple[Callable[[], None], Any]:
    """The same for what no tape can note, kernels: a replay runs the step again and puts its answer where the
    first one was. An engine's step puts it there itself.
    """
    answer = step()

    def replay() -> None:
        for old, new in zip(_numbers(answer), _numbers(step()), strict=True):
            old.copy_(new)

    return replay, answer


def _numbers(answer: Any) -> list[torch.Tensor]:
    return [value for value in (answer or {}).values() if isinstance(value, torch.Tensor)]
