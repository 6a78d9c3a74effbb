"""Engines that stay with their models between two calls of `generate_batch`, and the managers that run on
them.
"""

from __future__ import annotations

import weakref
from typing import Any

from ..blocks import OutOfBlocks
from ..engine import Engine
from ..kv import fork_safe_lock
from .options import WorkloadNeed

BLOCK_SIZE = 16
MOST_SEQUENCES = 1024
"""The most sequences at once where no other number is given."""
SPARE = 64
"""Blocks beyond a workload's need, for what its prompts have in common with earlier ones."""
PLACE = "_hf_paged_engine"
"""The attribute of a model that keeps its engine; no check of the model reads it."""
changing = fork_safe_lock()
"""Which engine a model keeps, and who runs on it, is changed by one thread at a time."""
_listing = fork_safe_lock()
"""Held for a moment while managers are added, taken out or counted: a set that is read must not change."""
_running: weakref.WeakKeyDictionary[Engine, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""The managers that run on each engine."""


class _Kept:
    """An engine on its model. A copy of the model has none."""

    def __init__(self, engine: Engine | None = None, options: Any = None, capacity: int = 0) -> None:
        self.engine = engine
        self.options = options
        self.capacity = capacity
        """The tokens that its pool was made for; 0 for as many as there is memory for."""

    def __reduce__(self) -> Any:
        return _Kept, ()


def _kept_on(model: Any) -> _Kept:
    """The engine kept on a model, if any."""
    kept = vars(model).get(PLACE)
    return kept if isinstance(kept, _Kept) else _Kept()


def engine_for(
    model: Any, options: dict[str, Any], need: WorkloadNeed | None, host_bytes: int | None = None
) -> Engine:
    """An engine on the model with these options and room for the need: the last one, if it has. Another one
    makes way, when no manager runs on it any more.

    host_bytes: the most that its blocks may take while they wait on the host.
    """
    tokens = 0 if need is None else need.sequences * _padded(need.tokens, options)
    with changing:
        kept = _kept_on(model)
        if kept.engine is not None:
            fits = not kept.capacity or 0 < tokens <= kept.capacity
            if fits and kept.options == (options, host_bytes) and not kept.engine.closed:
                return kept.engine
            drop_engine(model)
        engine = _made(model, options, need, tokens)
        if host_bytes is not None:
            _bound_host(engine, host_bytes)
        vars(model)[PLACE] = _Kept(engine, (dict(options), host_bytes), tokens)
        return engine


def begin_on(engine: Engine, manager: Any, alone: bool) -> bool:
    """Let a manager run on an engine, if that is not closed; `alone`, if no other runs with the model."""
    with changing:
        if engine.closed:
            return False
        if alone:
            require_alone(manager)
        with _listing:
            _running.setdefault(engine, weakref.WeakSet()).add(manager)
        return True


def require_alone(manager: Any) -> None:
    """Raise if another manager runs with the same model, whose ranks follow one at a time."""
    if any(each is not manager for each in running_with(manager.model)):
        raise RuntimeError(
            "another manager runs on this tensor-parallel model, whose ranks follow one at a time; stop that "
            "one first, or give it these requests"
        )


def end_on(engine: Engine, manager: Any) -> None:
    """A manager runs on its engine no more. With the last one its thread stops, and the engine is closed if
    the model keeps another. Twice is once.
    """
    with changing:
        managers = _running.get(engine, weakref.WeakSet())
        if manager not in managers:
            return
        with _listing:
            managers.discard(manager)
        if not managers:
            engine.stop()
            if _kept_on(manager.model).engine is not engine:
                engine.close()


def running_on(engine: Engine) -> list[Any]:
    """The managers that run on an engine."""
    with _listing:
        return list(_running.get(engine, ()))


def running_with(model: Any) -> list[Any]:
    """The managers that run with a model, on any engine."""
    with _listing:
        managers = [manager for several in _running.values() for manager in several]
    return [each for each in managers if each.model is model]


def _bound_host(engine: Engine, most: int) -> None:
    """Let at most so many bytes of blocks wait on the host."""
    for host, group in ((group.host, group) for group in engine.pools.groups.values()):
        if host is not None:
            host.most = min(host.most, int(most * group.share) // group.block_bytes)
            host.slab_blocks = max(1, min(host.most, host.slab_blocks))


def holds(engine: Engine, need: WorkloadNeed) -> bool:
    """True if the engine's pool is known to have room for all of a workload at once."""
    blocks = engine.config.num_blocks
    size = engine.config.block_size
    return blocks is not None and blocks * size >= need.sequences * _padded(need.tokens, {"block_size": size})


def drop_engine(model: Any) -> None:
    """Keep no engine on the model: it is closed, with the end of the last manager that runs on it."""
    with changing:
        engine = _kept_on(model).engine
        vars(model).pop(PLACE, None)
        if engine is not None and not running_on(engine):
            engine.close()


def _padded(tokens: int, options: dict[str, Any]) -> int:
    """The slots that so many tokens of a sequence may take."""
    size: int = options.get("block_size", BLOCK_SIZE)
    return (-(-tokens // size) + 1) * size


def with_budgets(options: dict[str, Any], need: WorkloadNeed | None) -> dict[str, Any]:
    """The options, and the budgets of a step for the need where there are none."""
    options = dict(options)
    if need is not None:
        options.setdefault("max_batch_sequences", min(need.sequences, MOST_SEQUENCES))
        options.setdefault("max_batch_tokens", max(2048, 2 * options["max_batch_sequences"]))
    return options


def _made(model: Any, options: dict[str, Any], need: WorkloadNeed | None, tokens: int) -> Engine:
    options = with_budgets(options, need)
    if need is None or "num_blocks" in options:
        return Engine(model, **options)
    size = options.get("block_size", BLOCK_SIZE)
    bounded = {name: value for name, value in options.items() if name != "memory_fraction"}
    try:
        return Engine(model, **bounded, num_blocks=-(-tokens // size) + SPARE)
    except OutOfBlocks:
        return Engine(model, **options)  # as many as there is memory for; requests wait for their turn
