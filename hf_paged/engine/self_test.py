"""A trial of verify="bytes": one byte of a cached block is flipped, and the next request must end by name."""

from __future__ import annotations

from torch import nn

from ..blocks.pool import CACHED
from ..kv.checksums import CorruptedBlock, flip_a_byte
from .engine import Engine

BLOCKS = 4
"""Blocks of the prompt that is asked three times."""


def self_test(model: nn.Module) -> str:
    """The error of a request whose cached prompt has a flipped byte, on this model and its device; raises if
    there is none, or if the request behind it fails.
    """
    with Engine(model, num_blocks=4 * BLOCKS, verify="bytes") as engine:
        prompt = [1 + place % 2 for place in range(BLOCKS * engine.config.block_size)]
        engine.generate([prompt], max_new_tokens=2)
        group = next(each for each in engine.pools.groups.values() if each.kind.fills)
        store = next(iter(group.stores.values()))
        flip_a_byte(store, group.pool.states().index(CACHED), layer=store.layers - 1)
        error = engine.submit(prompt, max_new_tokens=2).result().error
        if not isinstance(error, CorruptedBlock):
            raise RuntimeError(
                "verify='bytes' has not found the byte that was flipped; report this as a bug"
            ) from error
        engine.generate([prompt], max_new_tokens=2, strict=True)
    return f"{type(error).__name__}: {error}"
