"""An engine's inner objects, where no output shows what a test is about: each is reached for here alone."""

from __future__ import annotations

from typing import Any

from hf_paged.blocks import BlockPool
from hf_paged.engine import Engine
from hf_paged.engine.background import Background
from hf_paged.engine.preemption import Preemption
from hf_paged.engine.worker.check_policy import CheckPolicy
from hf_paged.engine.worker.eager import EagerModel
from hf_paged.kv import LayerGroup
from hf_paged.scheduling import Scheduler, SequenceGroup

# ---- requests


def scheduler_of(engine: Engine) -> Scheduler:
    """The queue and the running groups."""
    return engine.scheduler


def running(engine: Engine) -> list[SequenceGroup]:
    """The groups that run, the oldest first."""
    return list(scheduler_of(engine).running)


def preempted(engine: Engine) -> list[SequenceGroup]:
    """The groups that ran and wait to come back."""
    return list(scheduler_of(engine).preempted)


def preempt(engine: Engine, group: SequenceGroup) -> None:
    """Take a group's blocks, as the scheduler does when there are too few."""
    scheduler_of(engine).preempt(group)


# ---- blocks


def layer_groups(engine: Engine) -> list[LayerGroup]:
    """The tensors of all kinds of layers."""
    return list(engine.pools.groups.values())


def block_pools(engine: Engine) -> list[BlockPool]:
    """The books of the blocks, in the order of the kinds of layers."""
    return [group.pool for group in layer_groups(engine)]


def block_bytes(engine: Engine) -> int:
    """Bytes of one block of the first kind of layers."""
    return layer_groups(engine)[0].block_bytes


def costs_of(engine: Engine) -> Preemption:
    """The measured costs of swaps and recomputation."""
    return engine.preemption


# ---- steps


def checks_of(engine: Engine) -> CheckPolicy:
    """The policy of checks of the model."""
    return engine.checks


def count_steps_only(engine: Engine) -> None:
    """Have the model checked after a number of steps, however long these take."""
    checks_of(engine).clock = lambda: 0.0


def eager_of(engine: Engine) -> EagerModel:
    """The model over pages, operation by operation."""
    return engine.runner.eager


def compiling_of(engine: Engine) -> Any:
    """The threads that compile kernels."""
    return engine.runner.warming


# ---- threads


def thread_of(engine: Engine) -> Background:
    """The thread that drives the engine, which was started."""
    thread = engine.driver.background
    assert thread is not None
    return thread


def is_waited_for(engine: Engine) -> bool:
    """True while another thread waits for the step that runs."""
    return bool(engine.lock.waiting)


def has_unfinished(engine: Engine) -> bool:
    """True while a request has no output, or a step is in flight."""
    return engine.driver.books.busy


def swapped(engine: Engine) -> SequenceGroup:
    """The request that waits on the host for want of blocks, after steps until one does."""
    while not any(group.swapped for group in preempted(engine)):
        assert has_unfinished(engine)
        engine.step()
    return next(group for group in preempted(engine) if group.swapped)


def apart_of(engine: Engine) -> Any:
    """The forwards of adapters that peft's own modules compute."""
    adapters = eager_of(engine).adapters
    assert adapters is not None
    return adapters.apart
