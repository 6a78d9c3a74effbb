"""Decoding steps that are replayed: which of them, from when on, and how far a new graph is trusted."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...kv import Memory, is_out_of_memory
from ..lazy import NotCapturable
from ..lengths import LengthsOnDevice, lengths_on_device
from ..registry import memory_of
from ..snapshot import ModelSnapshot, Watch, watching
from .fusion import Fusion, fused
from .graph import Graph, ReplayableStep, agree, filled, shapes, signature, standing, too_wide
from .rehearsal import RECORDERS, Rehearsal

logger = logging.getLogger("hf_paged")

MANY = 48
"""Graphs that a model keeps; the least recently used goes first."""
AFTER = 2
"""A step is captured when it comes for this time: a call of a few tokens never pays for it."""
WORTH = 16
"""Nor does a call that has fewer tokens to go."""
LATER = 200
"""Steps until a capture is tried again that found no memory."""
LARGE = 2**30
"""Bytes of their own that the graphs of a model may keep."""

Run = Callable[[dict[str, Any]], Any]


class Graphs:
    """The captured steps of one model."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.counts: Counter[str] = Counter()
        """How many steps were "captured", "replayed", "refused"."""
        self.reasons: dict[Hashable, str] = {}
        """Why steps of a key are not captured."""
        self.unsteady = False
        """Whether the model's forward changes the model itself, so that no captured step would stay right."""
        self._seen: Counter[Hashable] = Counter()
        self._pool: Any = None

    # ---- one step

    def run(self, model: nn.Module, step: ReplayableStep, forward: Run) -> Any:
        """The answer of `forward` to the step, from a graph if there is a trusted one."""
        for part in step.parts:
            part.sequences.flush()
        facts = None if self.unsteady else _facts(step)
        if facts is None:
            return forward(step.arguments)
        watch = watching.get()
        known = None if watch is None else watch.snapshots.get(id(model))
        if known is not None and self._replay((known.graph_key, facts), step, model, watch):
            return self.memory.captured[known.graph_key, facts].hand_out(step)
        snapshot = ModelSnapshot(model) if watch is None else watch.current(model)
        key = (snapshot.graph_key, facts)
        if not snapshot.steady or key in self.reasons:
            return forward(step.arguments)
        if snapshot is not known and self._replay(key, step, model):
            return self.memory.captured[key].hand_out(step)
        answer = forward(step.arguments)
        self._learn(key, model, step, forward, answer)
        return answer

    def _replay(
        self, key: Hashable, step: ReplayableStep, model: nn.Module, watch: Watch | None = None
    ) -> bool:
        """Take the step in its graph, if there is a trusted one, and the pools need not move for it.

        Where the user's code runs between the steps of a watched call, the model is checked while the device
        works, and the step taken back if it has changed.
        """
        graph: Graph | None = self.memory.captured.get(key)
        if graph is None or not graph.trusted:
            return False
        before = [part.mark() for part in step.parts]
        graph.advance(step)
        valid = key in self.memory.captured
        if valid:
            self.memory.captured.move_to_end(key)
            graph.feed(step)
            graph.replay()
            if watch is not None and watch.foreign:
                valid = (watch.current(model).graph_key, _facts(step)) == key
        if not valid:
            for part, mark in zip(step.parts, before, strict=True):
                part.roll_back(mark)
            return False
        self.counts["replayed"] += 1
        for part in step.parts:
            part.follow()
        return True

    # ---- a new graph

    def _learn(
        self, key: Hashable, model: nn.Module, step: ReplayableStep, forward: Run, answer: Any
    ) -> None:
        """After a step that was taken the ordinary way: capture it, or see whether its graph says the same.

        Whatever goes wrong here, the step has its answer.
        """
        graph = self.memory.captured.get(key)  # the forward may have moved a pool
        try:
            if graph is None and self._is_worth_it(key, step):
                graph = self._capture(key, model, step, forward)
            if graph is not None and not graph.trusted:
                self._try(key, graph, step, answer)
        except Exception as error:
            self.memory.captured.pop(key, None)
            if is_out_of_memory(error):
                self._seen[key] = -LATER  # there may be room then
            else:
                self._refuse(key, f"{type(error).__name__}: {error}".split("\n")[0])

    def _is_worth_it(self, key: Hashable, step: ReplayableStep) -> bool:
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] += 1
        sequences = step.parts[0].sequences
        remaining = sequences.expected - sequences.columns if sequences.expected else WORTH
        return self._seen[key] >= AFTER and (remaining >= WORTH or self._seen[key] >= WORTH)

    def _capture(self, key: Hashable, model: nn.Module, step: ReplayableStep, forward: Run) -> Graph:
        """Capture the step that was just taken the ordinary way."""
        graph = Graph.prepare(step)
        fusion = Fusion(model, graph.ops(step).kernels)

        def run(lengths: LengthsOnDevice | None) -> Any:
            with standing(step, graph), fused(fusion), lengths_on_device(model, lengths):
                return forward({**step.lean, **graph.inputs})

        stores = [x for part in step.parts for _, rows in filled(part) for x in rows.group.tensors]
        before = ModelSnapshot(model).graph_key
        graph.stage(step)
        lengths = LengthsOnDevice()
        with Rehearsal(graph.device, [*model.parameters(), *model.buffers(), *graph.tensors, *stores]):
            run(lengths)
        if ModelSnapshot(model).graph_key != before:
            self.unsteady = True
            raise NotCapturable("the model's forward changes the model")
        graph.stage(step)
        captured = partial(run, lengths if lengths.met else None)
        graph.replay, answer = RECORDERS[graph.device.type](
            captured, self._shared_pool(graph.device), graph.device
        )
        graph.keep(answer)
        self.memory.captured[key] = graph
        self.counts["captured"] += 1
        while (
            len(self.memory.captured) > MANY
            or sum(other.bytes for other in self.memory.captured.values()) > LARGE
        ):
            if len(self.memory.captured) == 1:
                break
            self.memory.captured.popitem(last=False)
        return graph

    def _shared_pool(self, device: torch.device) -> Any:
        """Where all graphs keep what they compute with: one runs at a time, and what it answers is copied at
        once.

        A pool whose graphs are all gone is gone.
        """
        if device.type == "cuda" and not self.memory.captured:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _try(self, key: Hashable, graph: Graph, step: ReplayableStep, answer: Any) -> None:
        """Replay a step whose answer is known, and see."""
        graph.stage(step)
        graph.replay()
        if not agree(graph.hand_out(step), answer):
            raise NotCapturable("its replay differs from the forward itself")
        graph.agreed += 1

    def _refuse(self, key: Hashable, reason: str) -> None:
        if len(self.reasons) > 1000:
            self.reasons.clear()
        self.reasons[key] = reason
        self.counts["refused"] += 1
        logger.info("a decoding step is not captured: %s", reason)


def _facts(step: ReplayableStep) -> Hashable:
    """What must be the same for a replay beside the model, or None if this step cannot be captured whatever
    happens.
    """
    groups = [rows.group for part in step.parts for _, rows in filled(part)]
    devices = {device for group in groups for device in group.devices}
    paged = all(group.devices for group in groups) and all(part.complete for part in step.parts)
    if not paged or len(devices) != 1:
        return None
    device = devices.pop()
    facts = signature(step, device)
    if device.type not in RECORDERS or facts is None or any(too_wide(part, step.new) for part in step.parts):
        return None
    return step.mask, facts, tuple(shapes(part, step.new) for part in step.parts)


_graphs: weakref.WeakKeyDictionary[nn.Module, Graphs] = weakref.WeakKeyDictionary()


def graphs_of(model: nn.Module) -> Graphs:
    """The model's captured steps; they live as long as the model, their memory until a pool moves."""
    if model not in _graphs:
        _graphs[model] = Graphs(memory_of(model))
    return _graphs[model]
