"""Cases: blocks whose bytes change on one rank, with verify="bytes"."""

from __future__ import annotations

import copy
from typing import Any

import torch
from engine_answers import KINDS, PROMPTS, alone, answers, checked_answers, right
from engine_parts import block_pools, layer_groups, swapped
from rank_support import FEW, GREEDY, NEW, SMALL, loaded, raises, whole

import hf_paged
from hf_paged.blocks.pool import CACHED
from hf_paged.engine import Engine
from hf_paged.kv.checksums import CorruptedBlock, flip_a_byte
from hf_paged.model.registry import memory_of

VERIFIED: dict[str, Any] = {
    **SMALL,
    "verify": "bytes",
    "num_blocks": 22,
    "preemption": "swap",
    "watermark": 0.0,
}


def corrupted_blocks(rank: int) -> None:
    """A byte that changes on rank 1, on the device or while a block waits on its host, ends the request on
    all ranks; nothing else does.
    """
    engine = Engine(loaded("llama"), **VERIFIED)
    (group,) = layer_groups(engine)

    def receive(given: tuple[str, int]) -> None:
        where, block = given
        assert group.host is not None
        if where == "device":
            flip_a_byte(*group.stores.values(), block, layer=1)
        else:
            group.host.memory_of(block)[0].view(torch.uint8)[0] ^= 1

    with engine:
        if rank:
            assert not engine.follow(receive)
        else:
            _requests(engine, *block_pools(engine))


def _requests(engine: Engine, pool: Any) -> None:
    """Those of rank 0."""
    handles = [engine.submit(PROMPTS[p], max_new_tokens=NEW, seed=p, **KINDS[k]) for p, k in FEW]
    assert checked_answers(engine, handles) == [right("llama", p, k, NEW) for p, k in FEW]
    assert engine.generate([PROMPTS[3]], **GREEDY)[0].cached_tokens
    assert engine.stats()["verify"]["mismatched"] == 0
    cached = [block for block, state in enumerate(pool.states()) if state == CACHED]
    for block in cached:
        engine.broadcast(("device", block))
    bad = engine.submit(PROMPTS[3], **GREEDY).result()
    assert "first in layer 1" in str(bad.error), bad.error
    assert engine.stats()["verify"]["mismatched"] > 0
    handles = [engine.submit(PROMPTS[p], do_sample=False, max_new_tokens=60) for p in (2, 5)]
    engine.broadcast(("host", swapped(engine).leader.parked[0].blocks[-1]))
    errors = [str(handle.result().error) for handle in handles]
    assert errors[0] == "None", errors
    assert "swapped in" in errors[1], errors
    assert answers(engine.submit(PROMPTS[5], **GREEDY).result()) == right("llama", 5, 0, NEW)
    engine.check()


def corrupted_blocks_of_generate(rank: int) -> None:
    """All ranks raise at the end of the call, also those whose bytes are right."""
    model = loaded("llama")
    ids = torch.tensor([PROMPTS[3]], device=model.device)
    cache = hf_paged.PagedCache(model, block_size=4, verify="bytes")
    first = model.generate(ids, past_key_values=cache, **GREEDY)
    longer = torch.cat([first, ids[:, :3]], 1)
    expected = alone(whole("llama"), longer[0].tolist(), **GREEDY)

    def continued() -> list[list[int]]:
        """From a fork of the cache, which shares all of its blocks."""
        found = model.generate(longer, past_key_values=copy.deepcopy(cache), **GREEDY)
        return found[:, longer.shape[1] :].tolist()

    assert continued() == continued() == expected
    (group,) = [each for each in memory_of(model).groups.values() if each.pool.held]
    if rank == 1:
        flip_a_byte(*group.stores.values(), cache.tables()[0][2])
    raises(CorruptedBlock, "when the block was shared" if rank else "another rank has found", continued)
    assert group.pool.counts["mismatched"] == rank
