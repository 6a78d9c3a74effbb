"""Two tenants on one engine: neither evicts what the other has cached within its share (C43)."""

from __future__ import annotations

from typing import Any

import pytest
from families import BY_NAME, build

from hf_paged.engine import Engine

PROMPT = [5 + i % 90 for i in range(60)]
QUIET = {"tenant": "key-0", "salt": "salt of key-0", "do_sample": False, "eos_token_id": None}
FLOOD = {"tenant": "key-1", "salt": "salt of key-1", "do_sample": False, "eos_token_id": None}


@pytest.fixture
def model() -> Any:
    return build(BY_NAME["llama"])


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_flood_leaves_anothers_prefix(model: Any, preemption: str) -> None:
    """The flood's requests run eight at once and could fill the pool twice over, by cached blocks and by
    running requests; alone it has all of the pool.
    """
    with Engine(
        model, block_size=4, num_blocks=48, max_batch_sequences=8, max_batch_tokens=64, preemption=preemption
    ) as engine:
        first = engine.submit(PROMPT, max_new_tokens=4, **QUIET).result()
        flood = [engine.submit([i + 1, *PROMPT[i : i + 20]], max_new_tokens=28, **FLOOD) for i in range(16)]
        held = 0
        while not all(handle.done for handle in flood):
            engine.step()
            blocks = engine.stats()["blocks"]["full"]
            held = max(held, blocks["held"])
            assert blocks["cached_by_tenant"]["key-0"] >= 15
        again = engine.submit(PROMPT, max_new_tokens=4, **QUIET).result()
        assert again.timing is not None
        assert (first.cached_tokens, again.cached_tokens) == (0, 59)
        assert again.sequences[0].token_ids == first.sequences[0].token_ids
        assert held > 28, "what key-0 does not use of its share is borrowed"
        assert not any(engine.stats()["blocks"]["full"]["taken_by_tenant"].values())
        assert not any(handle.result().error for handle in flood)
        engine.check()


def test_a_request_that_needs_anothers_share_is_answered(model: Any) -> None:
    """It fits the pool, so it runs: at once, where nothing else runs; what that costs is counted."""
    with Engine(model, block_size=4, num_blocks=24, max_batch_tokens=32) as engine:
        engine.submit(PROMPT[:44], max_new_tokens=4, **QUIET).result()
        large = engine.submit(PROMPT, max_new_tokens=30, **FLOOD).result()
        assert large.error is None
        assert len(large.sequences[0].token_ids) == 30
        assert engine.stats()["blocks"]["full"]["taken_by_tenant"]["key-0"] > 0
        engine.check()
