"""Blocks of one token: nothing is ever unused, prompts lie side by side, and the host knows every id
(contract C37, C38, C39).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from compare import assert_same
from families import BY_NAME, VOCABULARY, build
from modes import MODES, supported
from simulated import Simulated

from hf_paged.blocks import BlockTable
from hf_paged.engine import Engine
from hf_paged.scheduling import Request, Status

PROMPTS = [
    torch.randint(5, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (30, 3, 17, 9, 12, 1)
]


@pytest.fixture(scope="module")
def assisted() -> Any:
    model = build(BY_NAME["llama"])
    object.__setattr__(model, "assistant", build(BY_NAME["llama"]))
    return model


@pytest.fixture(scope="module")
def windowed() -> Any:
    return build(BY_NAME["qwen2-window"])


@pytest.mark.parametrize("mode", [mode for mode in MODES if supported(mode, False)])
def test_generate_answers_as_stock(assisted: Any, ids: torch.Tensor, mode: str) -> None:
    """C37: every mode of generate() on blocks of one token."""
    arguments = {"input_ids": ids, **MODES[mode](assisted, ids)}
    arguments.setdefault("attention_mask", torch.ones_like(arguments["input_ids"]))
    assert_same(assisted, block_size=1, **arguments)


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": False, "num_beams": 3}], ids=["greedy", "beams"]
)
def test_the_engine_answers_as_generate(windowed: Any, options: dict[str, Any]) -> None:
    """C37, C23: few tokens and chunks, so that groups have to go and come back; free + held = total after
    every step.
    """
    with Engine(
        windowed,
        block_size=1,
        num_blocks=120,
        max_batch_tokens=8,
        max_batch_sequences=6,
        prefix_caching=False,
    ) as engine:
        handles = [engine.submit(prompt, max_new_tokens=9, **options) for prompt in PROMPTS]
        while not all(handle.done for handle in handles):
            engine.step()
            engine.check()
            assert all(
                kind["free"] + kind["held"] == kind["total"] for kind in engine.stats()["blocks"].values()
            )
        for prompt, handle in zip(PROMPTS, handles, strict=True):
            expected = windowed.generate(torch.tensor([prompt]), max_new_tokens=9, **options)[
                0, len(prompt) :
            ]
            found = handle.result().sequences[0].token_ids
            assert found == expected[: len(found)].tolist()
            assert not expected[len(found) :].any()  # nothing but padding


@pytest.mark.parametrize("admission", ["watermark", "future"])
def test_no_slot_is_unused(admission: str) -> None:
    """C37, C2: the slots held are the tokens stored, each counted once, in every step."""
    world = Simulated.of(total=90, size=1, tokens=12, sequences=6, admission=admission, prefix_caching=False)
    groups = [
        world.submit(Request(number, tuple(range(number, number + 11)), 24, 1 + number % 3))
        for number in range(8)
    ]
    while world.scheduler.unfinished:
        world.step()
        stored = 0
        for group in groups:
            stored += len(
                {
                    place
                    for sequence in group.sequences
                    for place in enumerate(sequence.tables[0].blocks[: sequence.computed])
                }
            )
        assert world.pools[0].held == stored
        assert world.pools[0].held + world.pools[0].free == world.pools[0].total
    world.assert_answered()


def test_a_prompt_in_chunks_lies_in_one_run() -> None:
    """C38: the lowest run that holds the whole prompt, although it is filled chunk by chunk and others grow
    meanwhile.
    """
    world = Simulated.of(total=100, size=1, tokens=8, sequences=4, prefix_caching=False)
    world.submit(Request(0, tuple(range(6)), 30))
    world.step()
    pool = world.pools[0]
    barriers = [BlockTable(pool, near=place) for place in (20, 45)]
    for barrier in barriers:
        barrier.append(1)  # free: 6 to 19, 21 to 44, 46 to 99
    long = world.submit(Request(1, tuple(range(3, 33)), 34))
    while long.leader.computed < 30:
        world.step()
    assert long.leader.tables[0].blocks[:30] == list(range(46, 76))
    short = world.submit(Request(2, tuple(range(10)), 12))
    while short.leader.computed < 10:
        world.step()
    assert short.leader.tables[0].blocks[:10] == list(range(21, 31))
    for barrier in barriers:
        barrier.free()
    world.run()
    world.assert_answered()


@pytest.mark.parametrize("host", [None, 40])
@pytest.mark.parametrize("window", [None, 5])
def test_who_plans_the_same_steps_knows_every_id(window: int | None, host: int | None) -> None:
    """C39, the host's side: which blocks a token gets depends on the steps so far and on nothing else,
    whoever works them out.
    """
    worlds = [
        Simulated.of(total=60, size=1, window=window, tokens=12, sequences=5, host=host) for _ in range(2)
    ]
    chances = [random.Random(7) for _ in worlds]
    for number in range(150):
        for world, chance in zip(worlds, chances, strict=True):
            alive = [group for group in world.groups if group.status is not Status.FINISHED]
            if len(alive) < 8:
                prompt = tuple(chance.randrange(3) for _ in range(chance.randrange(1, 18)))
                world.submit(
                    Request(number, prompt, len(prompt) + chance.randrange(1, 15), chance.choice([1, 1, 3])),
                    chance.random() < 0.3,
                )
            if chance.random() < 0.1 and alive:
                world.scheduler.abort(chance.choice(alive))
            if chance.random() < 0.1 and world.scheduler.running:
                world.scheduler.preempt(chance.choice(world.scheduler.running), swap=chance.random() < 0.7)
            world.step()
        one, other = (
            [[table.blocks for table in each.tables] for group in world.groups for each in group.sequences]
            for world in worlds
        )
        assert one == other
        assert [pool.states() for pool in worlds[0].pools] == [pool.states() for pool in worlds[1].pools]
    assert worlds[0].scheduler.counts == worlds[1].scheduler.counts
    assert worlds[0].scheduler.counts["preemptions"] > 10
