"""Decoding steps of generate() from captured ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from ...kv import Memory
from ..registry import memory_of
from ..snapshot import ModelSnapshot, StateKey, Watch, watching
from .graph import (
    Graph,
    ReplayableStep,
    groups_of,
    has_fixed_rows,
    rows_of_graph,
    shapes,
    signature,
    standing,
    too_wide,
)
from .pool import CapturePool
from .rehearsal import RECORDERS
from .step import Size, StepSource, agree

LEAST_STEPS = 16
"""A call that has fewer tokens to go does not pay for a capture, unless such calls come again and again."""

Run = Callable[[dict[str, Any]], Any]


class GenerateSteps:
    """The captured steps of one model in generate()."""

    def __init__(self, memory: Memory) -> None:
        self.pool = CapturePool(memory)

    def run(self, model: nn.Module, step: ReplayableStep, forward: Run) -> Any:
        """The answer of `forward` to the step, from a captured one if there is any that is trusted."""
        for part in step.parts:
            part.sequences.flush()
        source = None if self.pool.unsteady else _source(model, step, forward)
        if source is None:
            return forward(step.arguments)
        watch = watching.get()
        known = None if watch is None else watch.snapshots.get(id(model))
        if known is not None:
            state = self.pool.known(known.graph_key)
            graph = self._replay(state, source, watch)
            if graph is not None:
                return self._answer(state, source, graph)
        snapshot = ModelSnapshot(model) if watch is None else watch.current(model)
        state = self.pool.known(snapshot.graph_key)
        if snapshot is not known:
            graph = self._replay(state, source)
            if graph is not None:
                return self._answer(state, source, graph)
        answer = forward(step.arguments)
        if snapshot.steady:
            self.pool.learn(state, source, answer)
        return answer

    def _answer(self, state: StateKey, source: _GenerateSource, graph: Graph) -> Any:
        """What a replay has answered. If it stood in for a smaller step, that may be captured now."""
        answer = graph.hand_out(source.step)
        if graph.size != source.size:
            self.pool.learn(state, source, answer, stand_in=graph)
        return answer

    def _replay(self, state: StateKey, source: _GenerateSource, watch: Watch | None = None) -> Graph | None:
        """Take the step by a trusted graph, if there is one, and the pools need not move for it.

        Where the user's code runs between the steps of a watched call, the model is checked while the device
        works, and the step taken back if it has changed.
        """
        graph = self.pool.find(state, source.size, source.holders)
        step = source.step
        if not isinstance(graph, Graph):
            return None
        graph.advance(step)
        valid = self.pool.holds(graph)
        if valid:
            graph.feed(step)
            graph.replay()
            if watch is not None and watch.foreign:
                valid = self.pool.known(watch.current(source.model).graph_key) is state
        if not valid:
            source.take_back()
            return None
        self.pool.counts["replayed"] += 1
        for part in step.parts:
            part.follow()
        return graph


class _GenerateSource(StepSource[Graph]):
    """A step of generate()."""

    def __init__(
        self, model: nn.Module, step: ReplayableStep, forward: Run, code: Hashable, form: Hashable
    ) -> None:
        self.model = model
        self.step = step
        self._run = forward
        self._code = code
        self.size = Size(form, rows_of_graph(step))
        self.holders = (form,)
        self.groups = groups_of(step)
        self._before = [part.mark() for part in step.parts]

    @property
    def code(self) -> Hashable:
        return self._code

    def is_worth_it(self, seen: int) -> bool:
        sequences = self.step.parts[0].sequences
        remaining = sequences.expected - sequences.columns if sequences.expected else LEAST_STEPS
        return remaining >= LEAST_STEPS or seen >= LEAST_STEPS

    def snapshot(self) -> ModelSnapshot:
        return ModelSnapshot(self.model)

    def prepare(self) -> Graph:
        return Graph.prepare(self.step)

    def load(self, step: Graph) -> None:
        step.stage(self.step)

    def forward(self, step: Graph) -> Any:
        with standing(self.step, step):
            return self._run({**self.step.lean, **step.inputs})

    def agrees(self, step: Graph, answer: Any) -> bool:
        return agree(step.hand_out(self.step), answer)

    def take_back(self) -> None:
        """Be where the caches were before the step."""
        for part, mark in zip(self.step.parts, self._before, strict=True):
            part.roll_back(mark)

    def recompute(self) -> None:
        self.take_back()
        self._run(self.step.arguments)


def _source(model: nn.Module, step: ReplayableStep, forward: Run) -> _GenerateSource | None:
    """The step with what must be the same for a replay beside the model, or None if it cannot be captured
    whatever happens.
    """
    groups = groups_of(step)
    devices = {device for group in groups for device in group.devices}
    paged = all(group.devices for group in groups) and all(part.complete for part in step.parts)
    if not paged or len(devices) != 1:
        return None
    device = devices.pop()
    facts = signature(step, device)
    if device.type not in RECORDERS or facts is None or any(too_wide(part, step.new) for part in step.parts):
        return None
    code = step.mask, facts, step.new, step.rows if has_fixed_rows(step) else None
    return _GenerateSource(
        model, step, forward, code, (code, tuple(shapes(part, step.new) for part in step.parts))
    )


_steps: weakref.WeakKeyDictionary[nn.Module, GenerateSteps] = weakref.WeakKeyDictionary()


def captures_of(model: nn.Module) -> GenerateSteps:
    """The model's captured steps in generate(); they live as long as the model."""
    if model not in _steps:
        _steps[model] = GenerateSteps(memory_of(model))
    return _steps[model]


def drop_captures() -> None:
    """Drop the captured steps of all models in generate()."""
    for steps in list(_steps.values()):
        steps.pool.drop()
