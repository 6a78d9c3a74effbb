"""Admission by future peak (contract C40): the formula, groups, shared beginnings, windows, and that nobody
is preempted.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_requests import one_request
from simulated import Simulated

from hf_paged.blocks import BlockPool, Full
from hf_paged.scheduling import (
    AnswerLengths,
    FuturePeak,
    Infeasible,
    KVCacheGroup,
    Limits,
    Request,
    Scheduler,
    Status,
)
from hf_paged.scheduling.forecast import Segment, peak

KNOWN = [(5, 4), (4, 3), (5, 3), (3, 2), (4, 2)]


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return (first, *range(2, length + 1))


def ignorant(world: Simulated) -> Simulated:
    """Every answer is taken to become as long as it may."""
    world.scheduler.admission.history = AnswerLengths(keep=0)
    return world


def future_peak(sequences: Iterable[tuple[int, int]]) -> int:
    """The peak of sequences of `used` tokens that get `remaining` more, one in each step."""
    return peak(Segment(left, 1, used) for used, left in sorted(sequences, key=lambda each: -each[1]))


def test_the_worked_example() -> None:
    """C40: 9, 15, 23, 25, 31: need 31, in whatever order they come."""
    assert [future_peak(KNOWN[: n + 1]) for n in range(5)] == [9, 15, 23, 25, 31]
    assert future_peak(reversed(KNOWN)) == 31
    assert future_peak([]) == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=8))
def test_the_formula_is_the_highest_step(sequences: list[tuple[int, int]]) -> None:
    """C40: step by step, everybody grows by one until its end."""
    steps = [sum(used + step for used, left in sequences if left >= step) for step in range(1, 21)]
    assert future_peak(sequences) == max(steps)


def test_the_example_in_a_pool() -> None:
    """C40: with blocks of one token a newcomer is let in exactly if the peak fits."""
    for total, admitted in ((31, 5), (30, 4), (25, 4), (24, 3), (14, 1)):
        world = ignorant(
            Simulated.of(
                total=total, size=1, tokens=64, sequences=8, admission="future", prefix_caching=False
            )
        )
        # A prompt of n tokens is stored in the step that gives the first new one: n - 1 are used before, so
        # to say. And whoever ends is found a step late, so one token more is counted for each.
        for number, (used, left) in enumerate(KNOWN):
            world.submit(Request(number, prompt(used + 1, number + 1), used + left))
        assert len(world.step().admitted) == admitted
        world.run()
        world.assert_answered()
        assert world.scheduler.counts["preemptions"] == 0


@pytest.mark.parametrize("admission", ["future", "watermark"])
def test_the_peak_of_all_requests_is_known(admission: str) -> None:
    """C40: waiting ones too, whatever admits them. The example needs 31 slots."""
    for total in (62, 31, 16):
        world = Simulated.of(
            total=total, size=1, tokens=64, sequences=8, admission=admission, prefix_caching=False
        )
        assert world.scheduler.future_peak == 0
        for number, (used, left) in enumerate(KNOWN):
            world.submit(Request(number, prompt(used + 1, number + 1), used + left))
        assert world.scheduler.future_peak == pytest.approx(31 / total)
        world.run()
        assert world.scheduler.future_peak == 0


def test_the_peak_expects_answers_as_long_as_others_were() -> None:
    """C40: 100 answers had 2 tokens of 40, so 4 prompts of 10 are not taken to become 50 long."""
    world = Simulated.of(total=400, size=1, tokens=64, admission="future", prefix_caching=False)
    for _ in range(100):
        world.scheduler.admission.history.add(2)
    for number in range(4):
        world.submit(Request(number, prompt(10, number + 1), 50))
    assert world.scheduler.future_peak < 60 / 400


def test_blocks_cost_their_unused_slots() -> None:
    """C40: for B > 1 every sequence may hold B - 1 tokens more than it has."""
    for total, admitted in ((12, 2), (11, 1)):
        world = ignorant(
            Simulated.of(total=total, size=4, tokens=64, admission="future", prefix_caching=False)
        )
        for number in range(2):
            world.submit(Request(number, prompt(10, number + 1), 20))  # 20 slots and 3: 23 of 24
        assert len(world.step().admitted) == admitted
        world.run()
        assert world.scheduler.counts["preemptions"] == 0


def test_a_group_counts_its_prompt_once() -> None:
    """C40, C6: samples share the full blocks of their prompt, and each has a tail of its own, copied on
    write.
    """
    # 8 tokens in common, then three tails of 12 tokens and 3 unused slots: 8 + 3 * 15 = 53 slots; the other
    # needs 20 + 3: 76 together.
    for total, admitted in ((19, 2), (18, 1)):
        world = ignorant(
            Simulated.of(total=total, size=4, tokens=64, admission="future", prefix_caching=False)
        )
        world.submit(Request(0, prompt(10), 20, width=3))
        world.submit(Request(1, prompt(10, 5), 20))
        assert len(world.step().admitted) == admitted
        world.run()
        world.assert_answered()
        assert world.scheduler.counts["preemptions"] == 0


def test_a_young_group_leaves_room_for_a_short_one() -> None:
    """C40: samples grow by a token each in every step, so there is room for whoever ends before that."""
    world = ignorant(Simulated.of(total=64, size=1, tokens=64, admission="future", prefix_caching=False))
    world.submit(Request(0, prompt(4), 24, width=3))  # 64 slots in the end, 16 when the other one holds 32
    short = world.submit(Request(1, prompt(30, 5), 32))
    assert short in world.step().admitted
    world.run()
    world.assert_answered()
    assert world.scheduler.counts["preemptions"] == 0


def test_a_prompt_in_chunks_grows_later() -> None:
    """C40: nobody knows when a prompt of several steps begins to grow, so it counts in full, and to
    everybody's end.
    """
    world = ignorant(
        Simulated.of(total=35, size=1, tokens=4, sequences=4, admission="future", prefix_caching=False)
    )
    world.submit(Request(0, prompt(2), 20))
    world.step()
    world.submit(
        Request(1, prompt(20, 5), 26)
    )  # if it grew at once it would end when the other holds 8; it will then hold 15
    world.run()
    world.assert_answered()
    assert world.scheduler.counts["preemptions"] == 0


def test_a_shared_beginning_is_counted_once() -> None:
    """C40, C18: whoever begins with blocks that others hold needs the rest only, however many they are."""
    # 40 slots in common, and 4 tokens and 3 unused slots for each: 40 + 5 * 7 of 76. One alone counts 47.
    world = ignorant(Simulated.of(total=19, size=4, tokens=64, admission="future"))
    groups = [world.submit(Request(number, (*prompt(40), 3 + number), 44)) for number in range(6)]
    assert world.step().admitted == (groups[0],)
    assert world.step().admitted == tuple(groups[1:5])
    world.run()
    assert world.scheduler.counts["preemptions"] == 0
    world.assert_answered()
    world.assert_empty()


def test_the_shared_part_outlives_the_one_that_computed_it() -> None:
    """C40, C6: blocks that somebody else still names do not count as given back when their first owner
    ends.
    """
    world = ignorant(Simulated.of(total=20, size=4, tokens=64, sequences=3, admission="future"))
    world.submit(Request(0, (*prompt(40), 3), 44))
    world.step()
    world.submit(Request(1, (*prompt(40), 4), 64))  # holds the 40 and grows by 23: with it 17 blocks
    world.step()
    other = world.submit(
        Request(2, prompt(9, 6), 24)
    )  # 6 more: they would fit if the first one's 10 went with it
    plans = world.run()
    assert other not in plans[0].admitted
    assert world.scheduler.counts["preemptions"] == 0
    world.assert_answered()


def test_an_empty_engine_lets_in_the_first() -> None:
    """No deadlock: a request that fits alone runs alone, although its estimate with unused slots does not
    fit.
    """
    world = ignorant(Simulated.of(total=5, size=4, tokens=64, admission="future", prefix_caching=False))
    large, small = world.submit(Request(0, prompt(7), 20)), world.submit(Request(1, prompt(2, 5), 4))
    assert world.step().admitted == (large,)
    assert small.status is Status.WAITING
    world.run()
    world.assert_answered()


def test_estimates_follow_those_that_have_ended() -> None:
    """C40: max_new_tokens until somebody has ended; then as many as usually fit run side by side."""
    world = Simulated.of(total=60, size=1, tokens=64, sequences=8, admission="future", prefix_caching=False)

    def at_once(number: int) -> int:
        groups = [world.submit(Request(number + i, (2, 3), 52)) for i in range(4)]
        admitted = len(world.step().admitted)
        for group in groups:
            world.scheduler.abort(group)
        return admitted

    assert at_once(0) == 1
    world.scheduler.admission.history = AnswerLengths(doubt=0)
    for _ in range(20):
        world.scheduler.admission.history.add(5)
    assert at_once(10) == 4
    for _ in range(2000):
        world.scheduler.admission.history.add(50, limited=True)
    assert at_once(20) == 1


def test_an_answer_that_goes_on_is_estimated_anew() -> None:
    """C40: conditional on what is said already: whoever is longer than expected, and than anybody, may become
    as long as it may.
    """
    world = Simulated.of(total=60, size=1, tokens=64, sequences=8, admission="future", prefix_caching=False)
    for _ in range(20):
        world.scheduler.admission.history.add(5)
    others = [world.submit(Request(number, (2, number), 52)) for number in range(1, 5)]
    for _ in range(10):
        world.step()
    assert [group.status for group in others] == [Status.RUNNING] * 4
    second = world.submit(Request(5, (2, 4), 30))
    world.step()
    assert second.status is Status.WAITING  # there is room for it now, and four times 52 are more than 60
    for group in others[1:]:
        world.scheduler.abort(group)
    world.step()
    assert second.status is Status.RUNNING


@st.composite
def worlds(draw: st.DrawFn) -> Simulated:
    sequences = draw(st.integers(1, 6))
    return ignorant(
        Simulated.of(
            total=draw(st.integers(4, 60)),
            size=draw(st.sampled_from([1, 2, 4, 8])),
            window=draw(st.sampled_from([None, None, 1, 3, 9])),
            tokens=draw(st.integers(sequences, 24)),
            sequences=sequences,
            watermark=draw(st.sampled_from([0.0, 0.1])),
            policy=draw(st.sampled_from(["fcfs", "priority"])),
            admission="future",
            prefix_caching=draw(st.booleans()),
            verify=draw(st.booleans()),
        )
    )


@settings(max_examples=examples(60))
@given(world=worlds(), seed=st.integers(0, 10**6), moves=st.integers(5, 80))
def test_with_the_longest_answers_no_group_is_preempted(world: Simulated, seed: int, moves: int) -> None:
    """C40: samples and beams, shared beginnings, windows, chunks and aborts: whoever runs stays until its
    end.
    """
    rng = random.Random(seed)
    for number in range(moves):
        alive = [group for group in world.groups if group.status is not Status.FINISHED]
        if rng.random() < 0.4 and len(alive) < 12:
            try:
                world.submit(one_request(rng, number), beams=rng.random() < 0.4)
            except Infeasible:
                continue
        elif rng.random() < 0.05 and alive:
            world.scheduler.abort(rng.choice(alive))
        else:
            plan = world.step()
            assert not plan.preempted
            assert plan.rows or not world.scheduler.unfinished
    assert not any(plan.preempted for plan in world.run())
    world.assert_answered()
    world.assert_empty()


@pytest.mark.parametrize("seed", range(4))
def test_cross_tables_are_as_long_as_what_the_encoder_makes(seed: int) -> None:
    """C36, C40: however long the answer becomes; few blocks for encoders let few in, few for decoders none
    that must go.
    """
    rng = random.Random(seed)
    pools, encoders = [BlockPool(rng.choice([20, 60]), 4)], BlockPool(rng.choice([8, 24]), 4)
    world = ignorant(Simulated(pools, [Full()], Limits(9, 6, 0.0), encoders=encoders, admission="future"))
    for number in range(40):
        width, length = rng.choice([1, 1, 2, 3]), rng.randrange(1, 12)
        world.submit(
            Request(number, (1,) * length, length + rng.randrange(2, 12), width, source=rng.randrange(1, 30)),
            beams=width == 3,
        )
    assert not any(plan.preempted for plan in world.run())
    world.assert_answered()
    world.assert_empty()
    held = world.encoders.peak_held
    assert held > encoders.total // 2  # an encoder's table costs its own length, not its answer's


def test_fewer_preemptions_than_with_a_watermark() -> None:
    """C40: answers of unknown lengths: far fewer preemptions, less to compute, in few more steps."""
    found = {}
    for admission in ("watermark", "future"):
        rng = random.Random(5)
        world = Simulated.of(
            total=60,
            size=4,
            tokens=64,
            sequences=16,
            watermark=0.01,
            admission=admission,
            prefix_caching=False,
        )
        groups = {}
        for number in range(300):
            group = world.submit(Request(number, prompt(rng.randrange(4, 20), number), 100))
            groups[group] = min(100, group.length + 1 + int(rng.expovariate(1 / 20)))
        scheduler = world.scheduler
        while scheduler.unfinished:
            plan = scheduler.schedule()
            scheduler.commit(plan)
            for row in plan.rows:
                for sequence in row.samples:
                    scheduler.extend([sequence], [1])
                    if len(sequence.tokens) >= groups[sequence.group]:
                        scheduler.finish(sequence)
        scheduler.check()
        found[admission] = scheduler.counts
    assert found["watermark"]["preemptions"] > 100
    assert found["future"]["preemptions"] <= found["watermark"]["preemptions"] // 10
    assert found["future"]["tokens"] < found["watermark"]["tokens"]
    assert found["future"]["steps"] <= 1.25 * found["watermark"]["steps"]


def test_routers_have_names() -> None:
    kv_group = KVCacheGroup(Full(), Simulated.of(total=4).pools[0])
    limits = Simulated.of(total=4).limits
    assert isinstance(Scheduler([kv_group], limits, admission="future").admission, FuturePeak)
    with pytest.raises(ValueError, match="admission='peak'"):
        Scheduler([kv_group], limits, admission="peak")
