"""Adapters in the books: few slots, many adapters, and no request that pays for another's (C33)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupting import Interrupted
from scheduling_requests import one_request
from simulated import Simulated

from hf_paged.scheduling import AdapterSlots, Infeasible, Request, Status, scheduler

NAMES = [("a",), ("b",), ("c",), ("a", "b"), ("d",)]


def request(number: int, adapter: str = "", tokens: int = 6, prompt: int = 4, width: int = 1) -> Request:
    names = (adapter,) if adapter else ()
    ids = tuple(number % 5 + i for i in range(prompt))
    return Request(number, ids, prompt + tokens, width, adapter=names, adapter_key=adapter.encode())


def test_the_least_recently_used_makes_room() -> None:
    loaded: list[tuple[str, ...]] = []
    slots = AdapterSlots(2, lambda names, slot: loaded.append(names), lambda names: True)
    assert all(slots.acquire(names, set()) for names in (("a",), ("b",), ("a",), ("c",)))
    assert ("b",) not in slots
    assert not slots.acquire(("b",), {("a",), ("c",)})
    assert slots.acquire(("b",), {("a",)})
    assert loaded == [("a",), ("b",), ("c",), ("b",)]
    slots.release(("a",))
    slots.check({("b",)})
    with pytest.raises(AssertionError, match="no slot"):
        slots.check({("a",)})


def test_a_load_that_breaks_off_takes_no_slot() -> None:
    def interrupted(names: tuple[str, ...], slot: int) -> None:
        raise KeyboardInterrupt

    slots = AdapterSlots(1, interrupted, lambda names: True)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            slots.acquire(("a",), set())
        slots.check(set())


def test_adapters_without_memory_wait_for_others() -> None:
    """As many have slots at once as the device has had memory for, until one goes."""
    sizes, held, tried = {("a",): 2, ("b",): 2, ("c",): 3, ("d",): 9}, {}, []

    def load(names: tuple[str, ...], slot: int) -> None:
        tried.append(names)
        held.pop(slot, None)
        if sum(held.values()) + sizes[names] > 4:
            raise MemoryError
        held[slot] = sizes[names]

    slots = AdapterSlots(3, load, lambda names: True)
    assert slots.acquire(("a",), set())
    assert slots.acquire(("b",), {("a",)})
    assert not slots.acquire(("c",), {("a",), ("b",)})
    assert not slots.acquire(("c",), {("a",), ("b",)})
    assert tried.count(("c",)) == 1
    assert [slots.acquire(("c",), set()) for _ in range(3)] == [False, True, True]  # both others make room
    assert set(slots) == {("c",)}
    assert not slots.acquire(("a",), {("c",)})
    held.pop(slots.release(("c",)))
    assert slots.acquire(("a",), set())
    assert slots.acquire(("b",), {("a",)})
    for names in [*slots]:
        held.pop(slots.release(names))
    with pytest.raises(MemoryError):
        slots.acquire(("d",), set())
    slots.check(set())


def test_an_interrupt_loses_no_slot() -> None:
    """Ctrl-C at every place of an eviction: the slot is an adapter's or free, and the next one finds it."""
    places = 0
    while True:
        slots = AdapterSlots(1, lambda names, slot: None, lambda names: True)
        slots.acquire(("a",), set())
        if Interrupted(places + 1, ("/adapter_slots.py",))(lambda slots=slots: slots.acquire(("b",), set())):
            break
        slots.check(set())
        assert slots.acquire(("c",), set())
        places += 1
    assert places > 5


# ---- any mix


@st.composite
def worlds(draw: st.DrawFn) -> Simulated:
    sequences = draw(st.integers(1, 6))
    return Simulated.of(
        total=draw(st.integers(4, 40)),
        size=draw(st.sampled_from([1, 2, 4])),
        tokens=draw(st.integers(sequences, 24)),
        sequences=sequences,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        admission=draw(st.sampled_from(["watermark", "future"])),
        host=draw(st.sampled_from([None, 7, 30])),
        slots=draw(st.integers(1, 3)),
    )


def with_adapter(rng: random.Random, number: int, contents: dict[tuple[str, ...], int]) -> Request:
    names = rng.choice([(), *NAMES])
    made = one_request(rng, number)
    return replace(made, adapter=names, adapter_key=key_of(names, contents)) if names else made


def key_of(names: tuple[str, ...], contents: dict[tuple[str, ...], int]) -> bytes:
    return f"{names}{contents[names]}".encode()


@settings(max_examples=examples(68))
@given(world=worlds(), seed=st.integers(0, 10**6), moves=st.integers(5, 70))
def test_every_request_gets_its_own_adapter(world: Simulated, seed: int, moves: int) -> None:
    """Slow loads, aborts, preemptions, swaps and adapters of another content at any time."""
    rng = random.Random(seed)
    contents = dict.fromkeys(NAMES, 0)
    world.swap = lambda victim: rng.random() < 0.8
    world.delay = lambda: rng.choice([0, 0, 1, 4])
    where: dict[tuple[str, ...], int] = {}
    for _ in range(moves):
        move = rng.choices(["submit", "step", "abort", "preempt", "train"], [30, 60, 4, 4, 4])[0]
        alive = [group for group in world.groups if group.status is not Status.FINISHED]
        if move == "submit" and len(alive) < 12:
            try:
                asked = with_adapter(rng, len(world.requests), contents)
                world.submit(asked, beams=rng.random() < 0.3)
            except Infeasible:
                continue
        elif move == "abort" and alive:
            world.scheduler.abort(rng.choice(alive))
        elif move == "preempt" and world.scheduler.running:
            world.scheduler.preempt(rng.choice(world.scheduler.running), swap=rng.random() < 0.8)
        elif move == "train":
            names = rng.choice(NAMES)
            own = [group for group in alive if group.request.adapter == names]
            if all(group.status is Status.WAITING for group in own):
                contents[names] += 1
                for group in own:
                    world.scheduler.rekey(group, key_of(names, contents))
                    world.requests[group.request.number] = group.request
        else:
            world.step()
        slots = world.scheduler.adapters
        assert slots is not None
        running = {group.request.adapter for group in world.scheduler.running} - {()}
        assert len(running) <= slots.count
        assert all(slots.slot(names) == where.get(names, slots.slot(names)) for names in running)
        where = {names: slots.slot(names) for names in running}
        world.scheduler.check()
    world.run()
    world.assert_answered()
    world.assert_empty()


# ---- C33 as the contract words it


def admissions(world: Simulated, arrivals: dict[int, list[Request]], steps: int) -> dict[int, int]:
    """In which step each request first ran."""
    found: dict[int, int] = {}
    for step in range(steps):
        for each in arrivals.get(step, []):
            world.submit(each)
        for group in world.step().admitted:
            found.setdefault(group.request.number, step)
    return found


@settings(max_examples=examples(27))
@given(seed=st.integers(0, 10**6), tokens=st.integers(6, 20), blocks=st.integers(20, 60))
def test_a_group_that_finds_no_slot_delays_no_other(seed: int, tokens: int, blocks: int) -> None:
    """Base requests, and those of adapters that are there, run exactly when they would without it."""
    rng = random.Random(seed)
    arrivals: dict[int, list[Request]] = {0: [request(0, "a", tokens=70)]}
    passed_over = set()
    for number in range(1, 16):
        adapter = rng.choice(["", "a", "b", "c"])
        if adapter in ("b", "c"):
            passed_over.add(number)
        made = request(number, adapter, rng.randrange(2, 8), rng.randrange(2, 12))
        arrivals.setdefault(rng.randrange(1, 40), []).append(made)
    options = {"size": 4, "tokens": tokens, "sequences": 5, "slots": 1}
    found = admissions(Simulated.of(blocks, **options), arrivals, 60)
    without = {
        step: [each for each in several if each.number not in passed_over]
        for step, several in arrivals.items()
    }
    assert found == admissions(Simulated.of(blocks, **options), without, 60)
    assert not passed_over & found.keys()


def test_it_keeps_its_place() -> None:
    """When the slot is free, those who were passed over come in the order of arrival, before later ones."""
    world = Simulated.of(100, tokens=20, sequences=2, slots=1)
    arrivals = {0: [request(0, "a", tokens=10)], 1: [request(1, "b"), request(2, "c"), request(3, "d")]}
    arrivals[9] = [request(4, "e"), request(5, "a"), request(6)]
    found = admissions(world, arrivals, 60)
    assert sorted(found, key=lambda number: (found[number], number)) == [0, 5, 6, 1, 2, 3, 4]
    assert found[5] == found[0] + 9
    world.assert_answered()


def test_a_preempted_request_holds_no_slot() -> None:
    world = Simulated.of(100, tokens=20, sequences=4, slots=1)
    first = world.submit(request(0, "a", tokens=20))
    second = world.submit(request(1, "b"))
    world.step()
    world.scheduler.preempt(first)
    world.scheduler.abort(first)
    world.step()
    assert second.status is Status.RUNNING


def test_no_group_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless stream of one adapter's requests holds the only slot until patience ends; the base goes
    on.
    """
    monkeypatch.setattr(scheduler, "PATIENCE", 20)
    world = Simulated.of(200, tokens=64, sequences=30, slots=1)
    world.submit(request(0, "a", tokens=9))
    world.step()
    waits = world.submit(request(1, "b"))
    steps = 0
    while waits.status is Status.WAITING:
        world.submit(request(2 + 2 * steps, "a", tokens=9))
        base = world.submit(request(3 + 2 * steps, tokens=1))
        world.step()
        assert base.status is not Status.WAITING
        steps += 1
        assert steps < 60
    assert waits.passed_over > 20
