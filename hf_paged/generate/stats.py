"""A model's state between calls, in figures: `print(hf_paged.stats(model))`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from transformers import GenerationMixin

from ..kv import LayerGroup, Layout, Memory
from ..kv.ops import why_in_torch
from ..model.capture.replay import why_not_captured
from ..model.registry import base_model, known_memory
from ..model.slots import Slot
from ..model.support import why_dropped, why_not
from ..model.training import why_random
from .keys import why_never

NOT_ASKED = "no call has asked for it by cache_config={'prefix_caching': True}"


class PoolStats(NamedTuple):
    """The blocks of one kind of layer. free + held + cached = blocks, at any time."""

    kind: str
    """"full", "cross" or "window W"."""
    block_size: int
    blocks: int
    held: int
    """Blocks that caches hold."""
    cached: int
    """Blocks without references that a prompt may begin with."""
    free: int
    hits: int
    """Blocks that prompts found."""
    misses: int
    """Blocks of prompts that had to be computed."""
    copies: int
    """Blocks that were copied because their reader wrote on."""
    evictions: int
    """Cached blocks that were given up for others."""
    bytes: int
    checked: int = 0
    """Blocks that were compared with their checksums: verify="bytes"."""
    mismatched: int = 0
    """Those of them whose bytes had changed."""

    @classmethod
    def of(cls, group: LayerGroup) -> PoolStats:
        """Read a group's books."""
        pool = group.pool
        counts = group.pool.counts
        kind = group.kind.name if group.kind.window is None else f"{group.kind.name} {group.kind.window}"
        sizes = pool.block_size, pool.total, pool.held, pool.cached, pool.free
        blocks = counts["hits"], counts["misses"], counts["copies"], counts["evictions"]
        return cls(kind, *sizes, *blocks, group.bytes, counts["checked"], counts["mismatched"])


@dataclass(frozen=True)
class Stats:
    """The result of `hf_paged.stats(model)`. Figures of blocks count all pools together."""

    model: str
    layers: tuple[str, ...]
    """How attention read each layer in the last call: from its pages ("paged"), through a dense copy, by
    stock, or not at all.
    """
    pools: tuple[PoolStats, ...]
    reused: int
    """Tokens of prompts that were found, in calls with prefix caching."""
    computed: int
    """Tokens of prompts that were not."""
    rows_computed: int
    """Rows of all forwards of paged generate() that were computed."""
    rows_left_out: int
    """Rows that were not: they equal others in a prompt, or have ended."""
    rows_stay: str | None
    """Why rows that had ended stayed in the steps of the last call; None if they could leave."""
    reasons: Mapping[str, int]
    """Why prompts were computed whole, or not kept for others, and how often."""
    off: Mapping[str, str]
    """The parts that are off as the model is now, and why: "pages", "prefix_caching", "graphs", "kernels"."""

    @property
    def blocks(self) -> int:
        return sum(pool.blocks for pool in self.pools)

    @property
    def held(self) -> int:
        return sum(pool.held for pool in self.pools)

    @property
    def cached(self) -> int:
        return sum(pool.cached for pool in self.pools)

    @property
    def free(self) -> int:
        return sum(pool.free for pool in self.pools)

    @property
    def hits(self) -> int:
        return sum(pool.hits for pool in self.pools)

    @property
    def misses(self) -> int:
        return sum(pool.misses for pool in self.pools)

    @property
    def copies(self) -> int:
        return sum(pool.copies for pool in self.pools)

    @property
    def evictions(self) -> int:
        return sum(pool.evictions for pool in self.pools)

    @property
    def bytes(self) -> int:
        return sum(pool.bytes for pool in self.pools)

    def __str__(self) -> str:
        runs = [(path, len(list(run))) for path, run in groupby(self.layers)]
        lines = [
            self.model,
            "layers   " + (", ".join(f"{count} {path}" for path, count in runs) or "no call yet"),
        ]
        if self.pools:
            lines += _table(self.pools)
        lines.append(f"rows     {self.rows_computed:,} computed, {self.rows_left_out:,} left out")
        if self.reused or self.computed:  # they count calls with prefix caching
            lines.append(f"prompts  {self.reused:,} tokens reused, {self.computed:,} computed")
        lines += [f"         {count:,} x {reason}" for reason, count in sorted(self.reasons.items())]
        titles = ["off", *[""] * len(self.off)]
        lines += [
            f"{title:<9}{part}: {why}" for title, (part, why) in zip(titles, self.off.items(), strict=False)
        ]
        return "\n".join(lines)


def _table(pools: tuple[PoolStats, ...]) -> list[str]:
    """Pools as columns under headings."""
    shown = len(PoolStats._fields) if any(pool.checked for pool in pools) else -2
    rows = [[name.replace("_", " ") for name in PoolStats._fields[:shown]]]
    rows += [[f"{cell:,}" if isinstance(cell, int) else cell for cell in pool[:shown]] for pool in pools]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    titles = ["pools", *[""] * len(pools)]
    return [
        f"{title:<9}{row[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for title, row in zip(titles, rows, strict=True)
    ]


def stats(model: nn.Module) -> Stats:
    """Blocks held, cached and free, hits, misses, copies, evictions, the path of each layer, and what is off
    and why; it prints well.
    """
    base: Any = base_model(model)
    memory = known_memory(base)
    off = MappingProxyType(_parts_off(base, memory))
    if memory is None:
        return Stats(type(base).__name__, (), (), 0, 0, 0, 0, None, MappingProxyType({}), off)
    with memory.lock:
        memory.drain()
        pools = tuple(PoolStats.of(group) for group in memory.groups.values())
        counts = memory.counts
        reasons = MappingProxyType(dict(memory.reasons))
        return Stats(
            type(base).__name__,
            tuple(memory.paths),
            pools,
            counts["reused"],
            counts["computed"],
            memory.rows["computed"],
            memory.rows["left_out"],
            memory.rows_stay,
            reasons,
            off,
        )


def _parts_off(model: Any, memory: Memory | None) -> dict[str, str]:
    """The parts of a paged generate() that are off, by the names of options where they have one, and why."""
    if not issubclass(type(model), GenerationMixin):
        return {"pages": f"{type(model).__name__} does not generate"}
    slots: list[Slot] = []
    left = why_not(model, model.generation_config, slots) or why_dropped(model) or why_random(model)
    if left is not None:
        return {"pages": left}
    found = {layout for group in memory.groups.values() for layout in group.layouts} if memory else ()
    layouts = [layout for layout in found if isinstance(layout, Layout)]
    complete = all(slot.kind is not None and slot.paged.complete for slot in slots)
    states = any(not kind.fills for slot in slots for kind in slot.kinds)
    reasons = {
        "prefix_caching": why_never(complete, model, states)
        or (None if memory and memory.counts else NOT_ASKED),
        "graphs": why_not_captured(model),
        "kernels": why_in_torch("auto", layouts),
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}
