"""A record has what changed since the one before it: all of them together are the scheduler's books."""

from __future__ import annotations

import random

from simulated import Simulated

from hf_paged.engine.recorded import RecordedScheduler
from hf_paged.scheduling import Request
from hf_paged.trace import Name, Step, Table


def tables_of(world: Simulated) -> dict[Name, tuple[Table, ...]]:
    """The tables of all that run, from the books."""
    return {
        Name(group.request.number, sequence.index): tuple(
            Table(table.released, tuple(table.blocks)) for table in sequence.tables
        )
        for group in world.scheduler.running
        for sequence in group.sequences
        if sequence.tables[0].length
    }


def applied(tables: dict[Name, tuple[Table, ...]], step: Step) -> None:
    """Change tables as a record says."""
    for name, changes in step.tables.items():
        if changes is None:
            del tables[name]
        else:
            old = tables.get(name, tuple(Table(0, ()) for _ in changes))
            tables[name] = tuple(change.apply(was) for change, was in zip(changes, old, strict=True))


def prompt(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(3) for _ in range(rng.randrange(1, 14)))


def test_records_together_are_the_books() -> None:
    """Of requests of samples, some of which are preempted and wait on the host."""
    rng = random.Random(2)
    world = Simulated.of(total=24, size=2, tokens=12, host=20)
    recorded = RecordedScheduler(world.scheduler)
    tables: dict[Name, tuple[Table, ...]] = {}
    states: dict[int, str] = {}
    counted: dict[str, int] = {}
    arrived: list[int] = []
    sampled = preempted = 0
    for number in range(150):
        if number < 100 and rng.random() < 0.3:
            given = prompt(rng)
            width = rng.randrange(1, 4)
            world.submit(Request(number, given, len(given) + rng.randrange(2, 8), width=width))
        if world.scheduler.running and rng.random() < 0.1:
            world.scheduler.preempt(rng.choice(world.scheduler.running))
        plan = world.step()
        recorded.planned(plan)
        step = recorded.step(number, 0.0, plan.rows)
        applied(tables, step)
        assert tables == tables_of(world)
        states.update(step.states)
        alive = [*world.scheduler.running, *world.scheduler.preempted, *world.scheduler.waiting]
        assert all(states[group.request.number] == group.status.value for group in alive)
        for name, count in step.counted.items():
            counted[name] = counted.get(name, 0) + count
        arrived += [each.request for each in step.arrived]
        sampled += step.sampled
        preempted += len(step.preempted)
        assert step.blocks[0].held == world.pools[0].held
    assert counted == {name: count for name, count in world.scheduler.counts.items() if count}
    assert len(arrived) == len(set(arrived)) == len(world.requests)
    assert preempted
    assert sampled


def test_a_second_record_of_the_same_books_is_empty() -> None:
    world = Simulated.of(total=20, size=4, tokens=32)
    world.submit(Request(0, (1, 2, 3), 9))
    plan = world.step()
    recorded = RecordedScheduler(world.scheduler)
    recorded.planned(plan)
    first = recorded.step(0, 0.0, ())
    assert (len(first.tables), len(first.arrived), first.states) == (1, 1, {0: "running"})
    assert first.sampled == 1
    again = recorded.step(1, 1.0, ())
    assert (again.number, again.at, again.running) == (1, 1.0, 1)
    assert not any((again.tables, again.arrived, again.states, again.admitted, again.counted, again.sampled))


def test_closing_ends_the_logs_of_names() -> None:
    world = Simulated.of(total=20, size=4, tokens=32)
    recorded = RecordedScheduler(world.scheduler)
    assert len(world.pools[0].names.logs) == 1
    recorded.close()
    assert not world.pools[0].names.logs
