"""The engine's own pools: one per kind of layer, of a size that stays."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..blocks import Copy
from ..config import CacheConfig
from ..integration.registry import memory_of
from ..integration.slots import slots_of
from ..memory import Group, Kind
from ..memory.budget import free_bytes
from ..scheduling import Shelf
from ..trace import Kind as TracedKind
from ..trace import Trace
from .config import EngineConfig
from .support import Unservable

SHARE_OF_CUDA, SHARE_OF_CPU = 0.8, 0.25
"""The share of the free memory that an engine takes at most if nobody says how much."""
LONGEST = 4096
"""How long sequences are taken to become where the model has no limit."""
_engines = itertools.count()


@dataclass(frozen=True)
class _OwnPages(CacheConfig):
    """The options of one engine's pools: equal to nobody else's, so nobody else takes their blocks."""

    engine: int = -1


class Pools:
    """The layer groups of a model as one engine has them, in a fixed order: shelf i is group i."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        slots = slots_of(model, cross=False)
        others = {type(slot.source).__name__ for slot in slots if slot.kind is None or not slot.paged.complete}
        if others:
            raise Unservable(
                f"{type(model).__name__} has layers that keep more than keys and values ({', '.join(sorted(others))}); the engine cannot "
                "preempt or fork them yet, use generate()"
            )
        kinds = [slot.kind for slot in slots if slot.kind is not None]
        counts = Counter(kinds)
        self.config, self.layers = config, kinds
        self.memory = memory_of(model)
        pages = config.pages()
        self.options = _OwnPages(pages.block_size, None, None, pages.kernels, False, engine=next(_engines))
        self.groups: dict[Kind, Group] = {
            kind: self.memory.group(kind, self.options, count, count / len(kinds)) for kind, count in counts.items()
        }

    @property
    def shelves(self) -> tuple[Shelf, ...]:
        """What the scheduler knows of them."""
        return tuple(Shelf(group.pool, kind.window) for kind, group in self.groups.items())

    def lend(self, tokens: int) -> None:
        """Have blocks for a trial of two sequences of `tokens` tokens."""
        for group in self.groups.values():
            group.resize(2 * (group.pool.blocks_for(tokens) + 1))

    def settle(self, longest: int | None) -> None:
        """Take what the options say, or what the most sequences of the longest length need, within a share of the memory.

        After a trial, which has shown what a block is made of.
        """
        totals = [self._blocks(kind, group, longest or LONGEST) for kind, group in self.groups.items()]
        for group, total in zip(self.groups.values(), totals, strict=True):
            group.resize(total)

    def _blocks(self, kind: Kind, group: Group, longest: int) -> int:
        config = self.config
        if config.num_blocks is not None:
            return config.num_blocks
        device = next(iter(group.devices))
        share = config.memory_fraction or (SHARE_OF_CUDA if device.type == "cuda" else SHARE_OF_CPU)
        affordable = int(share * group.share * free_bytes(device)) // group.block_bytes
        if config.memory_fraction is not None:
            return affordable
        shelf = Shelf(group.pool, kind.window)
        return min(affordable, config.limits().sequences * (shelf.row_blocks(longest, config.max_batch_tokens) + 1))

    def copy(self, copies: tuple[tuple[Copy, ...], ...]) -> None:
        """Carry out the copies on write of a step."""
        for group, pairs in zip(self.groups.values(), copies, strict=True):
            if pairs:
                group.copy(list(pairs))

    def forget(self) -> None:
        """Drop what is cached: it was computed with other weights."""
        for group in self.groups.values():
            group.pool.forget()

    def free(self) -> None:
        """Give the pools back. Twice is once."""
        with self.memory.lock:
            for kind, group in self.groups.items():
                group.give_back()
                self.memory.groups.pop((kind, self.options), None)

    def described(self, model: str) -> Trace:
        """What a trace says before its first step."""
        kinds = tuple(TracedKind(name_of(kind), kind.window, group.pool.total) for kind, group in self.groups.items())
        limits = self.config.limits()
        return Trace(model, self.config.block_size, kinds, limits.tokens, limits.sequences, ())

    def usage(self) -> dict[str, dict[str, Any]]:
        """Blocks of every kind: total, held, cached, free."""
        return {
            name_of(kind): {
                "total": group.pool.total,
                "held": group.pool.held,
                "cached": group.pool.cached,
                "free": group.pool.free,
                "bytes": group.bytes,
            }
            for kind, group in self.groups.items()
        }


def name_of(kind: Kind) -> str:
    """What a kind of layer is called: "full", or "window" and how far it looks back."""
    return kind.name if kind.window is None else f"{kind.name}{kind.window}"
