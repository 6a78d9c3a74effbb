"""Decoding steps that are replayed: which of them, from when on, and how far a new graph is trusted."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from ..memory import Memory
from .cache import PagedCache
from .capture import RECORDERS, Rehearsal
from .fused import Fusion, fused
from .graph import AGREE, Graph, Step, agree, shapes, signature, standing
from .lazy import NotCapturable
from .lengths import lengths_on_device
from .registry import memory_of
from .state import ModelState, runs_hooks

logger = logging.getLogger("hf_paged")

MANY = 48
"""Graphs that a model keeps; the least recently used goes first."""
AFTER = 2
"""A step is captured when it comes for this time: a call of a few tokens never pays for it."""
WORTH = 16
"""Nor does a call that has fewer tokens to go."""

Run = Callable[[dict[str, Any]], Any]


class Graphs:
    """The captured steps of one model."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.counts: Counter[str] = Counter()
        """How many steps were "captured", "replayed", "refused"."""
        self.reasons: dict[Hashable, str] = {}
        """Why steps of a key are not captured."""
        self._seen: Counter[Hashable] = Counter()
        self._states: list[ModelState] = []
        self._pool: Any = None

    # ---- one step

    def run(self, model: nn.Module, step: Step, forward: Run) -> Any:
        """The answer of `forward` to the step, from a graph if there is a trusted one."""
        for part in step.parts:
            part.sequences.flush()
        key = self._key(model, step)
        if key is None or key in self.reasons:
            return forward(step.arguments)
        graph: Graph | None = self.memory.captured.get(key)
        if graph is not None and graph.trusted and self._replay(key, graph, step):
            return graph.hand_out(step)
        answer = forward(step.arguments)
        if graph is None and self._is_worth_it(key, step):
            graph = self._capture(key, model, step, forward)
        if graph is not None and not graph.trusted:
            self._try(key, graph, step, answer)
        return answer

    def _key(self, model: nn.Module, step: Step) -> Hashable:
        """What must be the same for a replay, or None if this step cannot be captured whatever happens."""
        first = step.parts[0]
        if first.model_state is None:
            first.model_state = self._state(model, step.parts)
        facts = signature(step)
        if first.model_state is False or facts is None:
            return None
        return first.model_state, step.mask, facts, tuple(shapes(part, step.new) for part in step.parts)

    def _state(self, model: nn.Module, parts: list[PagedCache]) -> ModelState | bool:
        """The model's state, the same object for equal ones; False if nothing over it may be captured."""
        devices = {device for part in parts for rows in part.sequences.rows.values() for device in rows.group.devices}
        paged = all(part.complete for part in parts)
        if not paged or len(devices) != 1 or devices.pop().type not in RECORDERS or model.training or runs_hooks(model):
            return False
        state = ModelState(model)
        known = next((one for one in self._states if one == state), None)
        if known is None:
            self._states = [*self._states[-7:], state]
        return known or state

    def _is_worth_it(self, key: Hashable, step: Step) -> bool:
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] += 1
        expected = max(rows.expected_columns for rows in step.parts[0].sequences.rows.values())
        remaining = expected - step.parts[0].sequences.columns if expected else WORTH
        return self._seen[key] >= AFTER and (remaining >= WORTH or self._seen[key] >= WORTH)

    def _replay(self, key: Hashable, graph: Graph, step: Step) -> bool:
        """Take the step in the graph; not if the pools had to move for it, and the graph is gone."""
        before = [part.sequences.positions for part in step.parts]
        graph.advance(step)
        if key not in self.memory.captured:
            for part, columns in zip(step.parts, before, strict=True):
                part.roll_back(columns)
            return False
        self.memory.captured.move_to_end(key)
        graph.feed(step)
        graph.replay()
        self.counts["replayed"] += 1
        for part in step.parts:
            part.follow()
        return True

    # ---- a new graph

    def _capture(self, key: Hashable, model: nn.Module, step: Step, forward: Run) -> Graph | None:
        """Capture the step that was just taken the ordinary way; None if it cannot be."""
        graph = Graph.prepare(step)
        fusion = Fusion(model, graph.ops(step).kernels)

        def run() -> Any:
            with standing(step, graph), fused(fusion), lengths_on_device(model):
                return forward({**step.lean, **graph.inputs})

        stores = [x for part in step.parts for rows in part.sequences.rows.values() for x in rows.group.tensors]
        try:
            graph.stage(step)
            with Rehearsal([*model.parameters(), *model.buffers(), *graph.tensors, *stores]):
                run()
            graph.stage(step)
            graph.replay, answer = RECORDERS[graph.device.type](run, self._shared_pool(graph.device), graph.device)
        except (NotCapturable, RuntimeError, ValueError, TypeError) as error:
            self._refuse(key, f"{type(error).__name__}: {error}".split("\n")[0])
            return None
        graph.keep(answer)
        self.memory.captured[key] = graph
        self.counts["captured"] += 1
        while len(self.memory.captured) > MANY:
            self.memory.captured.popitem(last=False)
        return graph

    def _shared_pool(self, device: torch.device) -> Any:
        """Where all graphs keep what they compute with: one runs at a time, and what it answers is copied at once.

        A pool whose graphs are all gone is gone.
        """
        if device.type == "cuda" and not self.memory.captured:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _try(self, key: Hashable, graph: Graph, step: Step, answer: Any) -> None:
        """Replay a step whose answer is known, and see."""
        graph.stage(step)
        graph.replay()
        if agree(graph.hand_out(step), answer):
            graph.agreed += 1
            return
        graph.differed += 1
        if graph.differed >= AGREE:
            del self.memory.captured[key]
            self._refuse(key, "its replay differs from the forward itself")

    def _refuse(self, key: Hashable, reason: str) -> None:
        if len(self.reasons) > 1000:
            self.reasons.clear()
        self.reasons[key] = reason
        self.counts["refused"] += 1
        logger.info("a decoding step is not captured: %s", reason)


_graphs: weakref.WeakKeyDictionary[nn.Module, Graphs] = weakref.WeakKeyDictionary()


def graphs_of(model: nn.Module) -> Graphs:
    """The model's captured steps; they live as long as the model, their memory until a pool moves."""
    if model not in _graphs:
        _graphs[model] = Graphs(memory_of(model))
    return _graphs[model]
