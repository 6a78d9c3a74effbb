"""The memory of an engine: of the weights, of a token, of the pools and of an adapter.

An engine that is there tells it, and so does the outline of one: the same parts, made of a model without
weights, for this machine or for a card of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from ..kv.budget import Room
from ..model.adapters.loading import bytes_of_rank
from ..model.servable import check_architecture
from ..model.shards import local_part
from .bounds import RequestBounds
from .worker.config import EngineConfig
from .worker.pools import Pools
from .worker.runner import Runner
from .worker.trial import Trial

LENGTH = 4096
"""Tokens of the requests that are counted, or the longest that the model is made for."""
RANK = 16
"""The rank of the adapter that is counted."""
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class PoolMemory(NamedTuple):
    """The pool of a kind of layers. block_size: None where a block is a slot for the states of a sequence, of
    whatever length. block_bytes: of one block in all layers.
    """

    kind: str
    block_size: int | None
    block_bytes: int
    blocks: int

    @property
    def bytes(self) -> int:
        """All of its blocks."""
        return self.blocks * self.block_bytes

    @property
    def token_bytes(self) -> int:
        """The keys and values of a token in all layers."""
        return 0 if self.block_size is None else self.block_bytes // self.block_size


class EngineMemory(NamedTuple):
    """The memory of an engine.

    weights: bytes, of `dtype` for the most part. tokens: how many the pools hold. requests: how many of
    `length` tokens fit at once. adapter: bytes of one of rank RANK on every linear layer. adapters: how many
    are on the device at once. captures: bytes that captured steps may take at most, which the pools leave to
    them. Each adapter that peft's own modules compute may take as many again.
    """

    weights: int
    dtype: torch.dtype
    pools: tuple[PoolMemory, ...]
    tokens: int
    length: int
    requests: int
    adapter: int
    adapters: int
    captures: int

    @classmethod
    def of(cls, pools: Pools, model: nn.Module, bounds: RequestBounds, captures: int) -> EngineMemory:
        """That of an engine's pools, as they are."""
        blocks = [group.pool.total for group in pools.groups.values()]
        return _memory(pools, model, bounds, blocks, captures)

    @classmethod
    def outlined(cls, model: Any, config: EngineConfig, room: Room) -> EngineMemory:
        """That of an engine which would be made of a model without weights. room: of the device, before it
        has the weights. Raises Unservable if there would be none.
        """
        check_architecture(model)
        pools = Pools(model, config)
        try:
            runner = Runner(model, pools)
            bounds = RequestBounds(runner)
            Trial(runner).outline()
            left = room._replace(free=max(0, room.free - bytes_of_weights(model)))
            captures = runner.capture_bytes_in(left)
            return _memory(pools, model, bounds, pools.planned(*bounds.lengths, captures, left), captures)
        finally:
            pools.free()

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in all layers that keep the sequence's own."""
        return sum(pool.token_bytes for pool in self.pools if pool.kind != "cross")

    @property
    def state_bytes(self) -> int:
        """Recurrent states of a sequence in all layers: a slot."""
        return sum(pool.block_bytes for pool in self.pools if pool.block_size is None)

    def facts(self) -> dict[str, str]:
        """All of it in words, by subject."""
        pools = "pool" if len(self.pools) == 1 else "pools"
        requests = "request" if self.requests == 1 else "requests"
        captured = f"{sized(self.captures)} at most, as much again for an adapter that peft's modules compute"
        states = f", {sized(self.state_bytes)} of states a sequence" if self.state_bytes else ""
        return {
            "weights": f"{sized(self.weights)} in {str(self.dtype).removeprefix('torch.')}",
            "keys and values": f"{sized(self.token_bytes)} a token{states}",
            pools: f"{self._blocks}, {sized(sum(each.bytes for each in self.pools))}",
            "room for": f"{self.tokens:,} tokens, {self.requests:,} {requests} of {self.length:,}",
            "adapters": f"{self.adapters} at once, {sized(self.adapter)} each of rank {RANK}",
            **({"captured steps": captured} if self.captures else {}),
        }

    @property
    def _blocks(self) -> str:
        """The blocks of every kind of layers; states have no tokens."""
        several = len(self.pools) > 1
        counts = [
            f"{each.blocks:,} {each.kind}" if several else f"{each.blocks:,}"
            for each in self.pools
            if each.block_size is not None
        ]
        size = next((each.block_size for each in self.pools if each.block_size is not None), None)
        found = [] if size is None else [f"{' and '.join(counts)} blocks of {size} tokens"]
        found += [f"{each.blocks:,} {each.kind} slots" for each in self.pools if each.block_size is None]
        return ", ".join(found)

    def __str__(self) -> str:
        """In two lines."""
        weights, keys, pools, room, *others = self.facts().items()
        first = f"weights {weights[1]}; {keys[0]} {keys[1]}"
        return f"{first}\n{pools[0]} of {pools[1]}: {room[1]}; " + "; ".join(
            f"{name}: {value}" for name, value in others
        )


def _memory(
    pools: Pools, model: Any, bounds: RequestBounds, blocks: Sequence[int], captures: int
) -> EngineMemory:
    longest, source = bounds.lengths
    length = min(LENGTH, longest or LENGTH)
    groups = list(zip(pools.groups.values(), blocks, strict=True))
    found = tuple(
        PoolMemory(
            group.kind.label,
            group.pool.block_size if group.kind.fills else None,
            group.block_bytes,
            count,
        )
        for group, count in groups
    )
    requests = _requests(pools, blocks, length, (source or LENGTH) if model.config.is_encoder_decoder else 0)
    linear = [count * group.pool.block_size for group, count in groups if group.kind.linear]
    return EngineMemory(
        weights=bytes_of_weights(model),
        dtype=model.dtype,
        pools=found,
        tokens=min(linear, default=requests * length),
        length=length,
        requests=requests,
        adapter=bytes_of_rank(model, RANK),
        adapters=pools.config.max_adapters,
        captures=captures,
    )


def _requests(pools: Pools, blocks: Sequence[int], length: int, source: int) -> int:
    """How many requests of `length` tokens fit at once, beside what admission leaves free. source: the tokens
    that each attends to across.
    """
    limits = pools.config.limits()
    fit = []
    for kv_group, count in zip(pools.kv_groups, blocks, strict=True):
        need = kv_group.need(1, length, length, limits.tokens, source)
        fit += [(count - int(limits.watermark * count)) // need] if need else []
    return min(fit)


def bytes_of_weights(model: nn.Module) -> int:
    """Parameters and buffers, those that share memory once; on ranks the part of this one."""
    held = {id(each): each for each in chain(model.parameters(), model.buffers())}
    return sum(local_part(each).nbytes for each in held.values())


def sized(count: float) -> str:
    """Bytes in words."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.3g} {UNITS[unit]}" if count < 1000 else f"{count:,.0f} {UNITS[unit]}"
