"""Random requests under random pressure: whoever else is there, every request gets the tokens it gets alone.

Held here: C7, C11, C12, C16, C22, C26 to C32, C34, and the books' own, for samples and beams, with windows
and without, under small pools and budgets, with prefixes in common, with aborts, failures, preemptions and
swaps at any time.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_requests import one_request
from simulated import Simulated

from hf_paged.blocks import Full, State, Window
from hf_paged.scheduling import Infeasible, Limits, Status

KINDS = [
    [Full()],
    [Full(), Window(1)],
    [Window(3)],
    [Full(), Window(9)],
    [Window(9), Full(), State()],
    [State(), Full()],
    [State()],
]


@st.composite
def worlds(draw: st.DrawFn) -> Simulated:
    sequences = draw(st.integers(1, 6))
    return Simulated.mixed(
        [
            (kind, draw(st.integers(4, 40)), draw(st.sampled_from([1, 2, 4, 8])))
            for kind in draw(st.sampled_from(KINDS))
        ],
        Limits(draw(st.integers(sequences, 24)), sequences, draw(st.sampled_from([0.0, 0.1]))),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        admission=draw(st.sampled_from(["watermark", "future"])),
        prefix_caching=draw(st.booleans()),
        verify=draw(st.booleans()),
        host=draw(st.sampled_from([None, 0, 7, 30, 100])),
        tenants=draw(st.sampled_from([("",), ("a", "b"), ("", "a", "b", "c")])),
    )


def walk(world: Simulated, rng: random.Random, moves: int, audit: int = 1) -> None:
    """Requests, steps and trouble in any order; the books are recounted after every `audit` moves."""
    world.checks = False
    world.swap = lambda victim: rng.random() < 0.8
    for number in range(moves):
        move = rng.choices(["submit", "step", "abort", "preempt", "fail", "forget"], [25, 60, 4, 3, 3, 1])[0]
        alive = [group for group in world.groups if group.status is not Status.FINISHED]
        if move == "submit" and len(alive) < 12:
            try:
                request = replace(one_request(rng, len(world.requests)), tenant=rng.choice(world.tenants))
                world.submit(request, beams=rng.random() < 0.4)
            except Infeasible:
                continue
        elif move == "abort" and alive:
            world.scheduler.abort(rng.choice(alive))
        elif move == "preempt" and world.scheduler.running:
            world.scheduler.preempt(rng.choice(world.scheduler.running), swap=rng.random() < 0.8)
        elif move == "forget":
            for pool in world.pools:
                pool.forget()
        elif move in ("step", "fail"):
            world.fails = (
                (lambda group: group.request.number % 3 == 0) if move == "fail" else (lambda group: False)
            )
            order = {group: (group.status, group.preemptions) for group in alive}
            # Of blocks that are never full samples take some when they fork, whoever else runs by then.
            filled = [pool for pool in world.pools if pool.fills]
            taken = sum(pool.taken.total() for pool in filled)
            ran = {*world.scheduler.running}
            plan = world.step()
            if sum(pool.taken.total() for pool in filled) > taken:  # C43: for a tenant's only group
                ran = {*ran, *plan.admitted} - {*plan.preempted}
                assert 1 in Counter(group.request.tenant for group in ran).values()
            if plan.preempted:
                assert not plan.admitted
            left = [group for group in alive if group.status is Status.PREEMPTED]
            for group in plan.admitted if len(world.tenants) == 1 else ():
                assert not left or order[group][0] is Status.PREEMPTED  # C28
            assert plan.rows or not world.scheduler.unfinished
        if number % audit == 0:
            world.scheduler.check()


@settings(max_examples=examples(80))
@given(world=worlds(), seed=st.integers(0, 10**6), moves=st.integers(5, 60))
def test_every_request_gets_its_own_tokens(world: Simulated, seed: int, moves: int) -> None:
    walk(world, random.Random(seed), moves)
    world.fails = lambda group: False
    world.run()
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize(
    ("window", "tenants", "host"),
    [
        (None, ("",), None),
        (None, ("",), 60),
        (5, ("",), 9),
        (5, ("",), None),
        (None, ("a", "b", "c"), 9),
        (None, ("a", "b", "c"), None),
    ],
)
def test_a_soak_leaks_nothing(window: int | None, tenants: tuple[str, ...], host: int | None) -> None:
    """Aborts and faults at random."""
    world = Simulated.of(total=24, size=4, window=window, tokens=12, sequences=5, watermark=0.05, host=host)
    world.tenants = tenants
    rng, counts = random.Random(f"{window} {host}"), world.scheduler.counts
    while counts["steps"] < examples(1000):
        walk(world, rng, 200, audit=5)
    world.fails = lambda group: False
    world.run()
    world.assert_answered()
    world.assert_empty()
    assert counts["preemptions"] > 25
    assert counts["recomputed"] > 4
    assert (counts["swapped_out"] > 8) == (counts["swapped_in"] > 4) == (host is not None)
