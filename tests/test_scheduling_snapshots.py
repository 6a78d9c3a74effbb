"""Snapshots of recurrent states: where a prompt leaves them, when they have a name, and what they give way to.

Held here: C9, C14, C18, C20, C22.
"""

from __future__ import annotations

import random

import pytest
from scheduling_prompts import squares as prompt
from simulated import Simulated, answer

from hf_paged.blocks import Full, State
from hf_paged.scheduling import Limits, Request, Status, StepPlan, prefixes


def world(slots: int = 12, every: int = 16, tokens: int = 64, **options) -> Simulated:
    return Simulated.mixed(
        [(Full(), 100, 4), (State(), slots, 4)], Limits(tokens, 8, 0.0), state_every=every, **options
    )


def covered(made: Simulated) -> list[int]:
    """The tokens behind each snapshot."""
    names = made.pools[1].names
    return sorted(names.covered(block) for block in names.of)


def counts(made: Simulated) -> list[int]:
    """The tokens of each chunk, to the end of all requests."""
    return [row.count for plan in made.run() for row in plan.rows if row.count > 1]


def test_a_prompt_leaves_one_every_so_many_tokens_and_at_its_ends() -> None:
    made = world()
    made.submit(Request(0, prompt(40), 43))
    assert counts(made) == [16, 16, 8]
    assert covered(made) == [16, 32, 40, 42]
    assert made.scheduler.prefixes.idle
    made.assert_answered()
    made.assert_empty()


def test_a_prompt_of_few_tokens_leaves_none_but_its_answer_does() -> None:
    made = world(every=64)
    made.submit(Request(0, prompt(9), 13))
    assert counts(made) == [9]
    assert covered(made) == [12]


def alone(every: int = 64) -> Simulated:
    """States without blocks beside them."""
    return Simulated.mixed([(State(), 12, 4)], Limits(64, 8, 0.0), state_every=every)


def test_without_blocks_prompts_part_at_names_of_begun_ones() -> None:
    """C18: the third goes on from there; a prompt with another key does not."""
    made = alone()
    hits = []
    for number in range(3):
        group = made.submit(Request(number, (*prompt(39), *prompt(9, number + 2)), 50))
        made.run()
        hits.append(group.cached_tokens)
    assert hits == [0, 0, 32]
    other = made.submit(Request(3, (*prompt(39), *prompt(9, 7)), 50, extra=b"another"))
    made.run()
    assert other.cached_tokens == 0
    made.assert_answered()
    made.assert_empty()


def test_without_blocks_twins_wait_and_the_first_cuts_where_they_part() -> None:
    made = alone(every=24)
    groups = [made.submit(Request(number, (*prompt(39), *prompt(9, number + 2)), 50)) for number in range(3)]
    made.run()
    assert [group.cached_tokens for group in groups] == [0, 32, 32]
    assert made.scheduler.prefixes.idle
    made.assert_answered()
    made.assert_empty()


def test_names_of_begun_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MOST_NAMES", 3)
    made = alone()
    hits = []
    for number, first in enumerate((0, 1, 0, 0, 0)):
        group = made.submit(Request(number, (*prompt(33, first), *prompt(9, number + 2)), 44))
        made.run()
        hits.append(group.cached_tokens)
    assert hits == [0, 0, 0, 0, 32], "the third finds its beginning forgotten, and the fourth parts from it"


def test_a_second_prompt_leaves_one_where_it_parts_from_the_first() -> None:
    """C18: its blocks reach farther than its states; the third goes on from there."""
    made = world(every=64)
    hits = []
    for number in range(3):
        group = made.submit(Request(number, (*prompt(33), *prompt(9, number + 2)), 44))
        made.run()
        hits.append(group.cached_tokens)
    assert hits == [0, 0, 33]
    made.assert_answered()
    made.assert_empty()


def test_a_twin_marks_where_it_will_part() -> None:
    """The first is in its prompt still: the second waits for it, and hits."""
    made = world(every=32, tokens=40)
    groups = [made.submit(Request(n, (*prompt(50), *prompt(9, n + 2)), 61)) for n in range(2)]
    assert counts(made)[:3] == [32, 16, 11]
    assert [group.cached_tokens for group in groups] == [0, 48]
    made.assert_answered()
    made.assert_empty()


def launched(made: Simulated) -> StepPlan:
    """A step, up to its launch."""
    plan = made.scheduler.schedule()
    made.copy(plan)
    for row in plan.rows:
        made.compute(row.sequence, row.start, row.count)
    made.scheduler.launch(plan)
    return plan


def test_it_has_a_name_once_its_step_is_computed() -> None:
    """C22: though the next step was launched meanwhile, which wrote in a copy (C14)."""
    made = world(tokens=16)
    made.submit(Request(0, prompt(40), 42))
    first = launched(made)
    (kept,) = [block for block, state in enumerate(made.pools[1].states()) if state]
    second = launched(made)
    assert [copy.source for copy in second.copies[1]] == [kept]
    assert covered(made) == []
    made.scheduler.confirm(first)
    assert covered(made) == [16]
    made.scheduler.confirm(second)
    assert covered(made) == [16, 32]
    made.run()
    made.assert_answered()
    made.assert_empty()


def test_a_step_that_fails_leaves_none() -> None:
    made = world(tokens=16)
    group = made.submit(Request(0, prompt(40), 42))
    plan = launched(made)
    made.scheduler.confirm(plan, [group])
    assert covered(made) == []
    assert made.scheduler.prefixes.snapshots.idle
    made.scheduler.abort(group)
    made.assert_empty()


def test_they_give_way_before_anyone_is_preempted() -> None:
    """C9: there is a slot for each sequence and none for copies."""
    made = world(slots=3, tokens=64)
    groups = [made.submit(Request(n, prompt(20, n), 30)) for n in range(3)]
    while made.scheduler.unfinished:
        made.step()
        assert sum(group.status is not Status.WAITING for group in groups) == 3
    assert made.scheduler.counts["preemptions"] == 0
    made.assert_answered()
    made.assert_empty()


def test_those_without_a_name_yet_give_way_too() -> None:
    """C9: a step is in flight that left one for each of two groups, and each needs a slot for its next chunk."""
    made = world(slots=2, tokens=32)
    for number in range(2):
        made.submit(Request(number, prompt(40, number), 42))
    first, second = launched(made), launched(made)
    assert [len(plan.rows) for plan in (first, second)] == [2, 2]
    assert made.scheduler.counts["preemptions"] == 0
    made.scheduler.confirm(first)
    made.scheduler.confirm(second)
    made.run()
    made.assert_answered()
    made.assert_empty()


def test_a_preempted_prompt_goes_on_from_the_last_one() -> None:
    made = world(tokens=16)
    group = made.submit(Request(0, prompt(60), 62))
    for _ in range(3):
        made.step()
    made.scheduler.preempt(group, swap=False)
    plan = made.step()
    assert [(row.start, row.count) for row in plan.rows] == [(48, 12)]
    made.run()
    made.assert_answered()
    made.assert_empty()


def test_the_snapshot_of_a_long_chat_outlives_those_of_short_prompts() -> None:
    """C20: it saves more tokens a slot than any of them, and the turn behind it computes its own tokens only."""
    made = world(slots=6, every=64)
    said = prompt(41)
    made.submit(Request(0, said, 42))
    made.run()
    for number in range(1, 12):
        made.submit(Request(number, prompt(9, number), 10))
        made.run()
    assert made.pools[1].counts["evictions"] >= 6
    assert covered(made).count(41) == 1
    turn = made.submit(Request(20, (*said, *prompt(5, 20)), 48))
    made.run()
    assert turn.cached_tokens == 41
    made.assert_answered()
    made.assert_empty()


def test_of_a_chat_the_last_snapshot_stays() -> None:
    """C20: without those before it, a snapshot saves the tokens of theirs too."""
    made = world(slots=6, every=64)
    said = prompt(20)
    for turn in range(5):
        request = Request(turn, said, len(said) + 4)
        made.submit(request)
        made.run()
        said = (*answer(request)[0], *prompt(1, turn))
    for number in range(10, 16):
        made.submit(Request(number, prompt(9, number), 10))
        made.run()
    assert len(said) - 2 in covered(made)
    assert len([tokens for tokens in covered(made) if tokens > 10]) < 5
    made.assert_answered()
    made.assert_empty()


@pytest.mark.parametrize("seed", range(3))
def test_they_take_no_slot_that_an_admitted_group_needs(seed: int) -> None:
    """C9: with a slot for each row and none beside them, whoever was admitted runs to its end."""
    chance = random.Random(seed)
    requests = []
    for number in range(12):
        width = chance.choice([1, 1, 2, 3])
        common = prompt(chance.choice([5, 17, 33]))
        own = prompt(chance.randrange(1, 8), number + 2)
        requests.append(
            (Request(number, (*common, *own), len(common) + 14, width=width), chance.random() < 0.5)
        )
    made = world(slots=8, tokens=24)
    for request, beams in requests:
        made.submit(request, beams=beams)
    made.run()
    assert made.pools[1].peak_held == 8
    assert made.pools[1].counts["evictions"] > 0
    assert made.scheduler.counts["preemptions"] == 0
    made.assert_answered()
    made.assert_empty()
