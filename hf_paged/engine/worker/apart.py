"""Forwards apart: an adapter that peft's own modules compute has a twin of the model, and a runner for it."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ...blocks import ADAPTER_SLOT, TASK
from ...kv import is_out_of_memory
from ...kv.budget import free_bytes
from ...model.adapters.content import AdapterContents
from ...model.adapters.peft_loading import PeftAdapter
from ...model.adapters.tasks import giving_task, modules_by_task
from ...model.adapters.twins import NoTwin, active_twin, twin_of, why_not_together, without_tuners
from ...model.adaption_prompts import configs_of
from ...model.dispatch import runs_unknown_code
from ...model.identity import identity_in
from ...model.ranks.tensor_parallel import mesh_of
from ...model.servable import Unservable
from ...model.snapshot import ModelSnapshot
from ...model.state_slots import StatesAdvanced
from ...scheduling import AdapterNames
from .adapters import require_room
from .forward_batch import Answer, ForwardBatch
from .pools import Pools
from .probe import CLOSE, CLOSE_IN_HALF, distance
from .runner import Runner, Verdicts
from .trial import Trial

OF_ADAPTERS = {ADAPTER_SLOT.name, TASK.name}
"""Columns that a twin does not read."""

logger = logging.getLogger("hf_paged")


def _title(names: AdapterNames) -> str:
    """The names of adapters, for a message."""
    return " and ".join(map(repr, names))


class ForwardApart(NamedTuple):
    """The forward of one adapter, or of several together, over the engine's pools.

    The runner of its twin takes the rows of a step that have the adapter, in the form in which the twin takes
    them, from captured steps of its own where there are any.
    """

    names: AdapterNames
    runner: Runner
    unknown: bool
    """True if it runs code of the user's."""
    by_task: list[nn.Module]
    """Its modules that compute each task in another way."""

    def run(self, batch: ForwardBatch, unseen: int) -> Answer:
        """The answer to rows of this adapter. unseen: steps since the engine has checked its model."""
        tasks = batch.columns.get(TASK.name) or (TASK.empty,) * len(batch.rows)
        columns = {name: each for name, each in batch.columns.items() if name not in OF_ADAPTERS}
        batch = batch._replace(columns=columns)
        self.runner.eager.checks.unseen = unseen
        try:
            if not self.by_task:
                return self.runner.run(batch)
            rows = {task: [i for i, each in enumerate(tasks) if each == task] for task in tasks}
            parts = [(own, partial(self._run_task, int(task))) for task, own in rows.items()]
            return self.runner.join(batch, parts)
        except (StatesAdvanced, Unservable):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise RuntimeError(
                f"the forward of the adapter {_title(self.names)} failed ({type(error).__name__}: {error})"
            ) from error

    def _run_task(self, task: int, batch: ForwardBatch) -> Answer:
        with giving_task(self.by_task, task):
            return self.runner.run(batch)


class ForwardsApart:
    """The forwards apart of an engine, by the slots of their adapters. A twin is tried out first, as the
    engine's model was: the form of its rows is its own.
    """

    def __init__(self, runner: Runner, contents: AdapterContents) -> None:
        self._runner = weakref.ref(runner)
        self._pools = runner.eager.pools
        self._model: nn.Module = runner.eager.model
        self._contents = contents
        self._device = runner.eager.device
        self.by_slot: dict[int, ForwardApart] = {}
        self.count = 0
        """How many were computed."""
        self._times: deque[tuple[Any, Any]] = deque()
        """The beginnings and ends of those whose time is not in `_ms` yet."""
        self._ms = 0.0
        self._base: ModelSnapshot | None = None
        """The model alone, as it was when the first of the twins was made."""
        self._changes = 0
        """How often the content of its weights was seen to have changed by then."""
        self._tried: dict[str, Verdicts] = {}
        """By the settings of adapters the findings of a trial."""

    @property
    def runners(self) -> list[Runner]:
        """The runner of each."""
        return [each.runner for each in self.by_slot.values()]

    def stats(self) -> dict[str, float]:
        """How many were computed, in which time, and the captured steps of those that there are."""
        captured = [each.captured for each in self.runners]
        pools = [each.captures for each in captured if each is not None]
        return {
            "forwards_apart": self.count,
            "ms_apart": self._ms_so_far(),
            "captured_apart": sum(map(len, pools)),
            "captured_apart_bytes": sum(pool.bytes for pool in pools),
        }

    def __contains__(self, slot: int) -> bool:
        return slot in self.by_slot

    def among(self, slots: Collection[int]) -> list[int]:
        """Those of some slots whose rows are computed apart."""
        return sorted(self.by_slot.keys() & set(slots)) if self.by_slot else []

    def run(self, slot: int, batch: ForwardBatch) -> Answer:
        """The answer to the rows of a slot."""
        runner = self._runner()
        assert runner is not None
        forward = self.by_slot[slot]
        self.count += 1
        if forward.unknown:
            runner.eager.checks.mark_dirty()
        self._ms_so_far()
        begin = self._now()
        answer = forward.run(batch, runner.eager.checks.unseen)
        self._times.append((begin, self._now()))
        return answer

    def _now(self) -> Any:
        """The time, on a CUDA device that of its stream of steps."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _ms_so_far(self) -> float:
        """The milliseconds of those that have ended."""
        while self._times:
            begin, end = self._times[0]
            if not isinstance(end, float) and not end.query():
                break
            self._ms += (end - begin) * 1000 if isinstance(end, float) else begin.elapsed_time(end)
            self._times.popleft()
        return self._ms

    def require_together(self, names: Sequence[str]) -> None:
        """Raise if adapters cannot be active together, some of which peft's own modules compute."""
        apart = next(name for name in names if self._contents.why_apart(name) is not None)
        own = next((name for name in names if name in self._contents.own), None)
        why: str | None
        if apart in self._contents.own:
            other = next(name for name in names if name != apart)
            why = f"{apart!r} is the engine's, and peft's own modules compute it without {other!r}"
        elif own is not None:
            why = f"peft's own modules compute {apart!r}, and {own!r} is the engine's"
        else:
            why = why_not_together(self._model, names)
        if why is not None:
            raise ValueError(
                f"adapter={names!r}: they cannot be active together, since {why}; name one of them"
            )

    # ---- twins

    def outdated(self) -> list[int]:
        """The slots whose twins are of the model as it was, while no request runs."""
        if self._base is None:
            return []
        if not self._base.unchanged():
            self._forget()
            return list(self.by_slot)
        changes = identity_in(self._base).changes
        if changes == self._changes:
            return []
        self._changes = changes
        own = {name: each for name, each in self._contents.own.items() if each.copies_base}
        for each in own.values():
            each.follow(self._model)
        return [slot for slot, forward in self.by_slot.items() if own.keys() & set(forward.names)]

    def leave(self, slot: int) -> None:
        """Let a slot have no forward of its own."""
        forward = self.by_slot.pop(slot, None)
        if forward is not None:
            forward.runner.close()

    def enter(self, names: AdapterNames, slot: int) -> None:
        """Let a slot have the forward of adapters. Raises Unservable where a twin, without adapters, is not
        the model, or cannot be computed over pages.
        """
        self.by_slot[slot] = self._made(names, self._contents.own.get(names[0]))

    def require_servable(self, name: str, loaded: PeftAdapter) -> None:
        """Raise for an adapter that cannot be served, before requests name it."""
        if mesh_of(self._model) is not None:
            raise ValueError(
                f"{loaded.why_apart} is computed by peft's own modules, which have no forwards where ranks "
                "divide the model; use fewer ranks"
            )
        runner = self._runner()
        assert runner is not None
        adapters: Any = runner.eager.adapters
        require_room(adapters, loaded.bytes)
        try:
            self._made((name,), loaded)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(
                f"the adapter {name!r} takes {loaded.bytes:,} bytes and what peft needs to load it, and "
                f"{self._device} has {free_bytes(self._device):,}; lower the engine's memory_fraction"
            ) from error

    def _made(self, names: AdapterNames, own: Any) -> ForwardApart:
        """The forward of adapters of the peft model, or of one of the engine's own."""
        try:
            self._look_at_model()
            if own is None:
                twin = active_twin(self._model, names)
                configs = configs_of(self._model) or {}
                settings = repr([configs[name].to_dict() if name in configs else name for name in names])
            else:
                twin = own.twin(self._model, names[0])
                settings = own.settings
            if settings not in self._tried:
                whole = any(map(self._contents.is_whole, names)) if own is None else own.whole
                self._tried[settings] = self._try(twin, whole)
                needed = sum(map(self._bytes_of, names)) if own is None else own.bytes
                logger.info(
                    "the adapter %s (%s bytes) runs in forwards of its own: peft's modules compute it",
                    _title(names), f"{needed:,}",
                )  # fmt: skip
            self._pools.add_layers_of(twin)
        except (NoTwin, Unservable) as error:
            raise Unservable(f"the adapter {_title(names)} cannot be chosen by request: {error}") from error
        runner = Runner(twin, self._pools)
        runner.take(self._tried[settings])
        by_task = modules_by_task(twin)
        if by_task:
            runner.captured = None  # one step would be of one task
        return ForwardApart(names, runner, runs_unknown_code(twin), by_task)

    def _bytes_of(self, name: str) -> int:
        return self._contents.read(name).bytes

    def _look_at_model(self) -> None:
        """See whether modules of a copy answer as the model does, once as long as it stays the same."""
        if self._base is not None and self._base.unchanged():
            return
        self._forget()
        self._require_same(without_tuners(twin_of(self._model)))
        self._base = ModelSnapshot(self._model, watch=True, alone=True)
        self._changes = identity_in(self._base).changes

    def _forget(self) -> None:
        """The model is another one than the twins that are there have been made of."""
        self._base = None
        self._tried.clear()
        for own in self._contents.own.values():
            if own.why_apart is not None:
                own.follow(self._model)

    def _try(self, twin: nn.Module, whole: bool) -> Verdicts:
        """Compute two short sequences on pages of the twin's own: the findings. whole: whether all tokens of
        a forward change each other.
        """
        pools = Pools(twin, self._pools.config)
        try:
            runner = Runner(twin, pools)
            if whole:
                runner.why_rows = "an adapter takes the mean of all tokens of a forward"
                runner.captures_rows = False
            with giving_task(modules_by_task(twin), 0):
                Trial(runner, whole).compare()
            runner.close()
            return runner.verdicts
        finally:
            pools.free()

    def _require_same(self, twin: nn.Module) -> None:
        """Raise unless a twin without peft's modules answers as the model does without adapters."""
        runner = self._runner()
        assert runner is not None
        assert runner.eager.adapters is not None
        with self._pools.memory.lock, torch.no_grad():
            with runner.eager.adapters.applied(None):
                right = Trial(runner).answers()
            found = Trial(Runner(twin, self._pools)).answers()
        dtype: Any = runner.eager.dtype
        if not torch.equal(right, found) and distance(right, found) > CLOSE.get(dtype, CLOSE_IN_HALF):
            raise Unservable(
                f"a copy of {type(twin).__name__}'s modules, without adapters, gives other logits than the "
                "model; use generate()"
            )
