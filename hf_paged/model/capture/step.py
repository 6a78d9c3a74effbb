"""The interface of a captured step to the pool that keeps it, and that of a caller that wants one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from ...kv import LayerGroup
from ...kv.reference import invariant
from ..device_map import devices_of
from ..snapshot import ModelSnapshot
from .compile import CompiledFusion
from .fusion import Fusion

AGREE = 2
"""How many steps of different lengths must come out as they do without a graph before it is trusted."""
NOISE = {torch.float32: 2e-3, torch.float16: 2**-6, torch.bfloat16: 2**-4}
"""How far a replayed number may lie from an ordinary one, relative to the largest: another position or length
lies further.
"""


class Size(NamedTuple):
    """The room of a captured step."""

    form: Hashable
    """Everything else that must be equal: a larger step of the same form can hold a smaller one."""
    rows: int
    width: int = 0
    """Blocks of a row, where tables of several widths serve one form."""
    adapters: int = 0
    """The layout of the table of adapters that it reads; 0 for the model alone."""


class CapturedStep:
    """One captured step: static tensors, and how it is replayed over them."""

    replay: Callable[[], None] = staticmethod(lambda: None)
    agreed = 0
    """How often a replay has agreed with an answer that was computed without it."""
    trusted = False
    """True once that was often enough."""
    compiled = False
    padded = 0
    """Rows that it has computed in vain since it stands in for smaller sizes."""
    groups: Sequence[LayerGroup] = ()
    """The layers whose pools it reads and writes."""
    holds_fewer = True
    """True if it can answer for fewer rows than it has."""
    size = Size(None, 0)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The static tensors of its own that the step reads and writes."""
        raise NotImplementedError

    @property
    def shared(self) -> Sequence[torch.Tensor]:
        """Static tensors that it has together with other steps."""
        return ()

    @property
    def bytes(self) -> int:
        """Memory that goes with this step."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def keep(self, answer: Any) -> None:
        """Note what the captured forward answered, in static tensors."""


S = TypeVar("S", bound=CapturedStep)


class StepSource(ABC, Generic[S]):
    """A step of a caller that a captured one may stand for: static inputs, how to load them, a forward."""

    model: nn.Module
    size: Size
    holders: Sequence[Hashable]
    """The forms that can hold this step, its own first."""
    groups: Sequence[LayerGroup]

    @property
    def devices(self) -> Sequence[torch.device]:
        """Where the step is computed, its inputs' device first."""
        return devices_of(self.model, self.groups)

    @property
    def comparable(self) -> bool:
        """True if the step has an answer to compare a replay with."""
        return True

    @property
    def repeatable(self) -> bool:
        """True if the step, which has run, may run again: captures are made of such steps alone."""
        return True

    @property
    def code(self) -> Hashable:
        """Steps of equal code do the same operations on tensors of other sizes."""
        return self.size.form

    @abstractmethod
    def snapshot(self) -> ModelSnapshot:
        """The model as it is."""

    def compile_ahead(self, fusion: Fusion) -> None:
        """Compile what a step will launch, before the first of its code, if that is not done yet."""

    @abstractmethod
    def prepare(self) -> S:
        """Static tensors for steps of this size."""

    @abstractmethod
    def load(self, step: S) -> None:
        """Load this step into static tensors; its tokens have their slots already."""

    @abstractmethod
    def forward(self, step: S) -> Any:
        """The model's forward over static tensors."""

    @abstractmethod
    def agrees(self, step: S, answer: Any) -> bool:
        """True if a replay of this step differs from its answer by no more than rounding."""

    @abstractmethod
    def recompute(self) -> None:
        """Compute the step without a captured one, because a wrong replay has written to the pages."""

    def is_worth_it(self, seen: int) -> bool:
        """True if so many steps like this one are expected, after `seen` of them, that a capture pays."""
        return True

    def compile(self, fusion: Fusion) -> CompiledFusion | None:
        """The forward's layers compiled, if they are wanted."""
        return None


def agree(one: Any, other: Any) -> bool:
    """True if two answers to one step differ by no more than rounding, judged by their first tensors."""
    first, second = (next(leaves(answer), None) for answer in (one, other))
    if first is None or second is None or first.shape != second.shape:
        return False
    if invariant.get():
        return torch.equal(first, second)
    numbers = second.float()
    largest = numbers.masked_fill(numbers.isinf(), 0).abs().amax().clamp(min=1)
    close = (first.float() - numbers).abs() <= NOISE.get(second.dtype, 0.0) * largest
    return bool((close | (first == second)).all())  # minus infinity is what a row cannot choose


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument or answer."""
    return (tensor for _, tensor in walk(value))


Path = tuple[str | int, ...]


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """All tensors in an argument or answer, with the names and places that lead to them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from walk(part, (*path, name))
    elif isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from walk(part, (*path, place))


@lru_cache(4096)
def bucket_of(rows: int, steps: int = 8) -> int:
    """The rows that a graph for `rows` rows has: so many steps, a power of two, from one power of two to the
    next.
    """
    step = 1 << max(0, (rows - 1).bit_length() - steps.bit_length())
    return -(-rows // step) * step
