"""Decoding steps of generate() from captured ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ...blocks import ADAPTER_SLOT, COLUMNS
from ...kv import Memory
from ...kv.ops import triton_package
from ..adapters.rows import RowAdapters
from ..device_map import devices_of, is_spread
from ..ranks.tensor_parallel import mesh_of
from ..ranks.votes import Votes, votes_of
from ..registry import memory_of
from ..rehearsal import RECORDERS
from ..snapshot import CallSnapshots, ModelSnapshot, StateKey, call_snapshots
from ..state_slots import rows_at
from .fusion import Fusion
from .graph import (
    CapturedCache,
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
from .step import Size, StepSource, agree
from .warmup import compile_step

LEAST_STEPS = 16
"""A call that has fewer tokens to go does not pay for a capture, unless such calls come again and again."""

Run = Callable[[dict[str, Any]], Any]


class GenerateSteps:
    """The captured steps of one model in generate()."""

    def __init__(self, memory: Memory, votes: Votes) -> None:
        """votes: those of the processes that compute the model."""
        self.pool = CapturePool(memory)
        self.adapters = RowAdapters()
        self.pool.join(votes)

    def run(self, model: nn.Module, step: ReplayableStep, forward: Run) -> Any:
        """The answer of `forward` to the step, from a captured one if there is any that is trusted."""
        for part in step.parts:
            part.sequences.flush()
        if self.pool.unsteady:
            return forward(step.arguments)
        kept = call_snapshots.get()
        known = None if kept is None else kept.snapshots.get(id(model))
        if known is None or (kept is not None and kept.foreign):
            for each in self.pool:
                if isinstance(each, Graph):
                    each.filled.clear()  # the user may have written to it, where torch counts nothing
        snapshot = known or _look(model, kept)
        source = self._source(model, step, forward, snapshot)
        if source is None:
            return forward(step.arguments)
        state = self.pool.known(snapshot.graph_key)
        graph = self._replay(state, source, None if known is None else kept)
        if graph is None and kept is not None and known is not None:
            snapshot = _look(model, kept)
            changed = snapshot is not known
            alike = not kept.foreign or self.pool.on_all_ranks(changed, "a step without a replay")
            if changed:
                state = self.pool.known(snapshot.graph_key)
                source = self._source(model, step, forward, snapshot)
                graph = self._replay(state, source, None) if source is not None and alike else None
        if source is None:
            return forward(step.arguments)
        if graph is not None:
            return self._answer(state, source, graph)
        answer = forward(step.arguments)
        self.pool.learn(state, source, answer, steady=snapshot.steady)
        return answer

    def _source(
        self, model: Any, step: ReplayableStep, forward: Run, snapshot: ModelSnapshot
    ) -> _GenerateSource | None:
        """The step as one that may be captured, with the adapters of its rows."""
        groups = groups_of(step)
        devices = devices_of(model, groups)
        if not devices or not all(group.devices for group in groups):
            return None
        if not all(part.complete for part in step.parts):
            return None
        kept = call_snapshots.get()
        device = devices[0]
        kernels = None
        if snapshot.lora and len(devices) == 1:  # their tables lie on one
            kernels = triton_package(step.parts[0].config.kernels, device, model.dtype)
        adapters = self.adapters.of_step(
            snapshot, step.rows, kernels, device, foreign=kept is None or kept.foreign
        )
        if adapters is not None:
            step.parts[0].sequences.put(ADAPTER_SLOT.name, adapters.slots)
        return _source(model, step._replace(adapters=adapters), forward, device)

    def with_adapters(
        self, model: Any, cache: CapturedCache, rows: int, device: torch.device
    ) -> AbstractContextManager[bool]:
        """Around a forward outside of captured steps: rows get their adapters from kernels, if there are any.
        The answer is whether they do.
        """
        kernels = triton_package(cache.config.kernels, device, model.dtype)
        if kernels is None or is_spread(model):
            return nullcontext(False)
        kept = call_snapshots.get()
        if kept is not None and id(model) not in kept.snapshots:
            kept = None  # between prompt and steps transformers may change how experts compute
        return self.adapters.forward(_look(model, kept), cache.sequences, rows, kernels, device)

    def _answer(self, state: StateKey, source: _GenerateSource, graph: Graph) -> Any:
        """The answer of a replay. If it stood in for a smaller step, that may be captured now."""
        answer = graph.hand_out(source.step)
        if graph.size != source.size:
            self.pool.learn(state, source, answer, stand_in=graph)
        return answer

    def _replay(self, state: StateKey, source: _GenerateSource, kept: CallSnapshots | None) -> Graph | None:
        """Take the step by a trusted graph, if there is one, and the pools need not move for it.

        Where the user's code runs between the steps of a call, the model is checked while the device
        works, and the step taken back if it has changed. Before a step that may not run again it is checked
        first.
        """
        found = self.pool.find(state, source.size, source.holders)
        graph = found if isinstance(found, Graph) else None
        step = source.step
        late = kept is not None and kept.foreign and source.may_repeat
        if graph is not None:
            graph.advance(step)
        valid = graph is not None and self.pool.holds(graph)
        if kept is not None and kept.foreign and not late:
            valid = valid and self._unchanged(state, source, kept)
        choice = valid, None if graph is None else graph.size.rows
        valid = self.pool.on_all_ranks(choice, "the beginning of a step") and valid
        if graph is None:
            return None
        if valid:
            graph.feed(step)
            graph.replay()
            if late and kept is not None:
                valid = self._unchanged(state, source, kept)
                valid = self.pool.on_all_ranks(valid, "the end of a replay") and valid
        if not valid:
            source.take_back()
            return None
        self.pool.counts["replayed"] += 1
        for part in step.parts:
            part.follow()
        return graph

    def _unchanged(self, state: StateKey, source: _GenerateSource, kept: CallSnapshots) -> bool:
        """True if the model, as it is now, is in the state that a captured step is of."""
        return self.pool.known(kept.current(source.model).graph_key) is state


def _look(model: nn.Module, kept: CallSnapshots | None) -> ModelSnapshot:
    return ModelSnapshot(model) if kept is None else kept.current(model)


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
        self._states = [
            (part.states, rows_at(part.sequences.columns, step.rows, step.new))
            for part in step.parts
            if part.states is not None
        ]
        """The states of recurrent layers, and the rows that the step advances."""

    @property
    def may_repeat(self) -> bool:
        """True if the step, before it has run, may run twice: no row advances a state where it reads it."""
        return all(states.may_repeat(rows) for states, rows in self._states)

    @property
    def repeatable(self) -> bool:
        return all(states.may_run(rows) for states, rows in self._states)

    @property
    def code(self) -> Hashable:
        return self._code

    def is_worth_it(self, seen: int) -> bool:
        sequences = self.step.parts[0].sequences
        remaining = sequences.expected - sequences.columns if sequences.expected else LEAST_STEPS
        return remaining >= LEAST_STEPS or seen >= LEAST_STEPS

    def snapshot(self) -> ModelSnapshot:
        return ModelSnapshot(self.model)

    def compile_ahead(self, fusion: Fusion) -> None:
        compile_step(self.model, self.step, fusion)

    def prepare(self) -> Graph:
        return Graph.prepare(self.step, self.devices[0])

    def load(self, step: Graph) -> None:
        step.stage(self.step)

    def forward(self, step: Graph) -> Any:
        adapters = self.step.adapters
        with standing(self.step, step):
            own = nullcontext() if adapters is None else adapters.applied(self.step.parts[0].sequences)
            with own:
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


def _source(
    model: nn.Module, step: ReplayableStep, forward: Run, device: torch.device
) -> _GenerateSource | None:
    """The step with what must be the same for a replay beside the model, or None if it cannot be captured
    whatever happens.
    """
    facts = signature(step, device)
    if device.type not in RECORDERS or facts is None or any(too_wide(part, step.new) for part in step.parts):
        return None
    adapted = None if step.adapters is None else step.adapters.form
    rows = step.rows if has_fixed_rows(step) else None
    code = step.mask, facts, step.new, rows, adapted, tuple(COLUMNS)
    return _GenerateSource(
        model, step, forward, code, (code, tuple(shapes(part, step.new) for part in step.parts))
    )


_steps: weakref.WeakKeyDictionary[nn.Module, GenerateSteps] = weakref.WeakKeyDictionary()


def captures_of(model: nn.Module) -> GenerateSteps:
    """The model's captured steps in generate(); they live as long as the model."""
    if model not in _steps:
        mesh = mesh_of(model)
        votes = Votes() if mesh is None else votes_of(mesh.get_group())
        _steps[model] = GenerateSteps(memory_of(model), votes)
    return _steps[model]


def why_not_captured(model: Any) -> str | None:
    """Why steps of generate() are not captured, or which of them were refused; None if nothing was."""
    if model.device.type not in RECORDERS:
        return f"steps are captured on CUDA devices, the model is on {model.device}"
    steps = _steps.get(model)
    refused = {} if steps is None else dict.fromkeys(steps.pool.reasons.values())
    return "some steps: " + "; ".join(refused) if refused else None


def drop_captures(model: nn.Module | None = None) -> None:
    """Drop the captured steps of a model, or of all models, in generate()."""
    for each, steps in list(_steps.items()):
        if model is None or each is model:
            steps.pool.drop()
