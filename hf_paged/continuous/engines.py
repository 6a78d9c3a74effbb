"""Engines that stay with their models between two calls of `generate_batch`."""

from __future__ import annotations

from typing import Any

from ..blocks import OutOfBlocks
from ..engine import Engine
from .options import WorkloadNeed

BLOCK_SIZE = 16
MOST_SEQUENCES = 1024
"""The most sequences at once where no other number is given."""
SPARE = 64
"""Blocks beyond a workload's need, for what its prompts have in common with earlier ones."""
PLACE = "_hf_paged_engine"
"""The attribute of a model that keeps its engine; no check of the model reads it."""


class _Kept:
    """An engine on its model. A copy of the model has none."""

    def __init__(self, engine: Engine | None = None, options: Any = None, capacity: int = 0) -> None:
        self.engine = engine
        self.options = options
        self.capacity = capacity
        """The tokens that its pool was made for; 0 for as many as there is memory for."""

    def __reduce__(self) -> Any:
        return _Kept, ()


def engine_for(
    model: Any, options: dict[str, Any], need: WorkloadNeed | None, host_bytes: int | None = None
) -> Engine:
    """An engine on the model with these options and room for the need: the last one, if it has.

    host_bytes: the most that its blocks may take while they wait on the host.
    """
    kept = vars(model).get(PLACE)
    tokens = 0 if need is None else need.requests * _padded(need.tokens, options)
    if isinstance(kept, _Kept) and kept.engine is not None:
        fits = not kept.capacity or 0 < tokens <= kept.capacity
        if fits and kept.options == (options, host_bytes) and not kept.engine.closed:
            return kept.engine
        kept.engine.close()
    engine = _made(model, options, need, tokens)
    if host_bytes is not None:
        _bound_host(engine, host_bytes)
    vars(model)[PLACE] = _Kept(engine, (dict(options), host_bytes), tokens)
    return engine


def _bound_host(engine: Engine, most: int) -> None:
    """Let at most so many bytes of blocks wait on the host."""
    for host, group in ((group.host, group) for group in engine.pools.groups.values()):
        if host is not None:
            host.most = min(host.most, int(most * group.share) // group.block_bytes)
            host.slab_blocks = max(1, min(host.most, host.slab_blocks))


def holds(engine: Engine, need: WorkloadNeed) -> bool:
    """Whether the engine's pool is known to have room for all of a workload at once."""
    blocks = engine.config.num_blocks
    size = engine.config.block_size
    return blocks is not None and blocks * size >= need.requests * _padded(need.tokens, {"block_size": size})


def drop_engine(model: Any) -> None:
    """Close the engine that is kept on the model, if there is one."""
    kept = vars(model).pop(PLACE, None)
    if isinstance(kept, _Kept) and kept.engine is not None:
        kept.engine.close()


def _padded(tokens: int, options: dict[str, Any]) -> int:
    """The slots that so many tokens of a sequence may take."""
    size: int = options.get("block_size", BLOCK_SIZE)
    return (-(-tokens // size) + 1) * size


def with_budgets(options: dict[str, Any], need: WorkloadNeed | None) -> dict[str, Any]:
    """The options, and the budgets of a step for the need where there are none."""
    options = dict(options)
    if need is not None:
        options.setdefault("max_batch_sequences", min(need.requests, MOST_SEQUENCES))
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
