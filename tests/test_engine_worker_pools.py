"""Pools on the host begin with memory for a share of their blocks and grow; requests are judged by all of
them (C5, C11).
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from engine_answers import answers
from engine_parts import block_bytes
from families import BY_NAME, VOCABULARY, build
from tape import record

from hf_paged.engine import Engine
from hf_paged.engine.worker import pools
from hf_paged.kv import store
from hf_paged.model.rehearsal import RECORDERS

OPTIONS: dict[str, Any] = {"block_size": 4, "max_batch_sequences": 8, "max_batch_tokens": 64}
GROWS = "have memory for"


@pytest.fixture(autouse=True)
def _small_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SHARE_AT_FIRST", 1e-9)


def memory(engine: Engine) -> tuple[int, int, int]:
    found = engine.stats()["memory"]
    return found["reserved_bytes"], found["used_bytes"], found["most_bytes"]


def requests(count: int, seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of all lengths, some that begin alike, some with several samples or beams."""
    chance = random.Random(seed)
    common = [chance.randrange(5, VOCABULARY) for _ in range(40)]
    params = []
    for _ in range(count):
        prompt = common[: chance.choice([0, 0, 20, 40])] + [
            chance.randrange(5, VOCABULARY) for _ in range(chance.randint(1, 90))
        ]
        kind = chance.choice(
            [{}, {}, {"num_beams": 3}, {"do_sample": True, "seed": 4, "num_return_sequences": 3}]
        )
        params.append((prompt, {"max_new_tokens": chance.choice([1, 8, 30]), "do_sample": False, **kind}))
    return params


def test_a_pool_on_the_host_is_for_as_many_sequences_as_a_cpu_computes_well() -> None:
    """Unless the options say how many run. Shorter ones, and more of them, find room in the same blocks."""
    model = build(BY_NAME["llama"])
    row = 256 // 16 + 1
    for options, blocks in (
        ({}, 64 * row),
        ({"max_batch_sequences": 100}, 100 * row),
        ({"num_blocks": 9}, 9),
    ):
        with Engine(model, **options) as engine:
            assert engine.stats()["blocks"]["full"]["total"] == blocks
    with Engine(model) as engine:
        handles = [engine.submit([5 + i % 90], max_new_tokens=3) for i in range(200)]
        engine.step()
        assert engine.stats()["running"] == 200
        for handle in handles:
            handle.cancel()


def test_the_first_request_takes_a_share(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool takes the blocks that it needs and no more; a crowd finds room before it runs."""
    monkeypatch.setattr(pools, "SHARE_AT_FIRST", 1 / 16)
    with (
        Engine(build(BY_NAME["llama"]), max_batch_sequences=32, max_batch_tokens=64) as engine,
        caplog.at_level(logging.INFO),
    ):
        most = memory(engine)[2]
        engine.generate([[5, 6, 7]], max_new_tokens=4)
        reserved, used, _ = memory(engine)
        assert 0 < reserved <= most / 16
        assert used == engine.stats()["blocks"]["full"]["cached"] * block_bytes(engine)
        assert not [line for line in caplog.messages if GROWS in line]
        handles = [engine.submit([5, 6, i], max_new_tokens=100) for i in range(30)]
        engine.step()
        assert [line for line in caplog.messages if GROWS in line]  # once for all of them
        reserved = memory(engine)[0]
        assert all(handle.result().error is None for handle in handles)
        assert memory(engine) == (reserved, memory(engine)[1], most)
        assert len([line for line in caplog.messages if GROWS in line]) == 1


@pytest.mark.parametrize(
    ("family", "ahead"), [("llama", False), ("llama", True), ("gemma3", False), ("t5", True)]
)
def test_answers_do_not_depend_on_where_a_pool_began(
    family: str, ahead: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From one block on, with requests that come while others run, captured steps, beams, prefixes and
    preemptions.
    """
    monkeypatch.setitem(RECORDERS, "cpu", record)
    model, params = build(BY_NAME[family]), requests(9, seed=ahead)
    with Engine(model, num_blocks=700, **OPTIONS) as engine:
        expected = [answers(engine.submit(prompt, **options).result()) for prompt, options in params]
    chance = random.Random(5)
    with Engine(model, run_ahead=ahead, **OPTIONS) as engine, caplog.at_level(logging.INFO):
        left, handles, busy = list(params), [], 0
        while left or not all(handle.done for handle in handles):
            for prompt, options in [
                left.pop(0) for _ in range(min(len(left), chance.choice([0, 0, 0, 1, 2])))
            ]:
                handles.append(engine.submit(prompt, **options))
            running, before = engine.stats()["running"], len(caplog.messages)
            engine.step()
            busy += bool(running) and any(GROWS in line for line in caplog.messages[before:])
            engine.check()
            reserved, used, most = memory(engine)
            assert used <= reserved <= most
        assert [answers(handle.result()) for handle in handles] == expected
        assert busy


def test_requests_are_judged_by_what_the_pool_can_become() -> None:
    """C11: the longest that fits is served at once, from one block on; one beyond is refused with both
    numbers.
    """
    model = build(BY_NAME["llama"])
    with Engine(model, block_size=4, max_batch_sequences=1, max_batch_tokens=32) as engine:
        longest = engine.submit([7] * 200, max_new_tokens=56, do_sample=False)
        short = engine.submit([8], max_new_tokens=2, do_sample=False)
        assert len(longest.result().sequences[0].token_ids) == 56
        assert short.result().error is None
        refused = engine.submit([7] * 200, max_new_tokens=57).result()
        assert refused.finish_reason == "refused"
        assert "257" in str(refused.error)


def test_a_number_of_blocks_is_reserved_at_once() -> None:
    with Engine(build(BY_NAME["llama"]), num_blocks=50, block_size=4) as engine:
        engine.generate([[5, 6, 7]], max_new_tokens=2)
        reserved, _, most = memory(engine)
        assert reserved == most > 0


def test_memory_that_is_short_is_taken_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where twice as much is refused, what is needed is enough."""
    with Engine(build(BY_NAME["llama"]), **OPTIONS) as engine:
        expected = answers(engine.generate([[5, 6, 7]], max_new_tokens=60, do_sample=False)[0])
    inner = store.allocate
    with Engine(build(BY_NAME["llama"]), **OPTIONS) as engine:
        block = block_bytes(engine) // 4

        def scarce(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            if elements > 17 * block:
                raise MemoryError
            return inner(elements, dtype, device)

        monkeypatch.setattr(store, "allocate", scarce)
        assert answers(engine.generate([[5, 6, 7]], max_new_tokens=60, do_sample=False)[0]) == expected
        engine.check()
