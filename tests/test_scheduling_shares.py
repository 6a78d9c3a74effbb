"""Tenants keep their shares of the blocks, whatever others cache or run (contract C43)."""

from __future__ import annotations

import pytest
from scheduling_prompts import prompt
from simulated import Simulated

from hf_paged.scheduling import Request, SequenceGroup, Status, scheduler

POOL = 40


def world_of(**options: object) -> Simulated:
    return Simulated.of(total=POOL, size=4, tokens=64, sequences=8, **options)


def asked(world: Simulated, tenant: str, tokens: int, new: int, **more: int) -> SequenceGroup:
    """A request of a tenant, whose tokens are nobody else's."""
    number = len(world.requests)
    return world.submit(
        Request(
            number, prompt(tokens, 10 + number), tokens + new, extra=tenant.encode(), tenant=tenant, **more
        )
    )


def cached(world: Simulated, tenant: str) -> int:
    return world.pools[0].cached_by_tenant.get(tenant, 0)


def leave(world: Simulated, tenant: str, blocks: int) -> None:
    """Cached blocks of a request that is over."""
    asked(world, tenant, 4 * blocks, 1)
    world.run()
    assert cached(world, tenant) == blocks


@pytest.mark.parametrize("admission", ["watermark", "future"])
@pytest.mark.parametrize("host", [None, 100])
def test_a_flood_leaves_the_others_their_share(admission: str, host: int | None) -> None:
    """By requests that run as well as by those that are over: their answers grow into the whole pool."""
    world = world_of(admission=admission, host=host)
    leave(world, "quiet", 15)
    for _ in range(40):
        asked(world, "flood", 12, 30)
    while world.scheduler.unfinished:
        world.step()
        assert cached(world, "quiet") == 15
    assert world.pools[0].peak_held == POOL - 15
    assert not +world.pools[0].taken
    world.assert_answered()
    world.assert_empty()


def test_what_is_not_used_is_borrowed_and_given_back() -> None:
    """Alone a tenant has the whole pool. When another comes, it gets its half as requests end."""
    world = world_of()
    for _ in range(12):
        asked(world, "first", 16, 24)
    for _ in range(10):
        world.step()
    assert world.pools[0].held > POOL * 0.7
    for _ in range(12):
        asked(world, "second", 16, 24)
    world.run()
    assert cached(world, "first") == cached(world, "second") == POOL // 2
    world.assert_answered()


def test_others_do_not_wait_for_a_share() -> None:
    """A group that its own tenant's groups hold back keeps its place, and others within reach pass it."""
    world = world_of()
    leave(world, "quiet", 15)
    first, second, third = (asked(world, "flood", 40, 20) for _ in range(3))
    world.step()
    late = asked(world, "quiet", 8, 4)
    world.step()
    assert [group.status for group in (first, second, third)] == [
        Status.RUNNING,
        Status.RUNNING,
        Status.WAITING,
    ]
    assert late.status is Status.RUNNING
    assert world.scheduler.counts["held_back"] > 0
    world.run()
    assert not +world.pools[0].taken
    world.assert_answered()


def test_a_borrower_is_preempted_before_a_cached_block_goes() -> None:
    """The tenant above its share loses its latest group, although another tenant's came later."""
    world = world_of()
    leave(world, "quiet", 10)
    first = asked(world, "flood", 40, 20)
    second = asked(world, "flood", 40, 20)
    world.step()
    latest = asked(world, "quiet", 16, 60)
    while not second.preemptions:
        world.step()
        assert world.scheduler.unfinished == 3
    assert first.preemptions == latest.preemptions == 0
    assert not +world.pools[0].taken
    world.run()
    world.assert_answered()
    world.assert_empty()


def test_a_request_larger_than_its_share_runs() -> None:
    """At once where nothing else runs: waiting would change nothing. What others lose is counted."""
    world = world_of()
    leave(world, "quiet", 20)
    large = asked(world, "large", 110, 30)
    world.step()
    assert large.status is Status.RUNNING
    world.run()
    assert 0 < world.pools[0].taken["quiet"] < 20
    world.assert_answered()
    world.assert_empty()


def test_a_request_larger_than_its_share_is_not_passed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others within their shares pass it, for so many steps; then it waits for what runs, and takes the rest."""
    monkeypatch.setattr(scheduler, "PATIENCE", 12)
    world = world_of()
    leave(world, "quiet", 15)
    asked(world, "busy", 4, 6)
    world.step()
    large = asked(world, "large", 108, 4)
    passed = []
    while large.status is Status.WAITING:
        passed.append(asked(world, "busy", 4, 6))
        world.step()
        assert len(passed) < 40
    assert 2 < sum(group.status is not Status.WAITING for group in passed) < 15
    assert world.scheduler.running == [large], "it takes blocks only where nothing else runs"
    world.run()
    assert world.pools[0].taken["quiet"] > 0
    world.assert_answered()
    world.assert_empty()


def test_who_comes_within_its_share_gets_it_back() -> None:
    """A tenant that has borrowed starts nothing more while another waits for its own, and no third one loses."""
    world = world_of()
    leave(world, "quiet", 12)
    for _ in range(5):
        asked(world, "borrower", 8, 24)
    for _ in range(6):
        world.step()
    owner = asked(world, "owner", 40, 4)
    later = [asked(world, "borrower", 8, 24) for _ in range(9)]
    world.step()
    assert owner.status is Status.WAITING
    while owner.status is Status.WAITING:
        assert all(group.status is Status.WAITING for group in later)
        world.step()
    assert not +world.pools[0].taken
    world.run()
    assert not +world.pools[0].taken
    world.assert_answered()


def test_weights_are_shares() -> None:
    world = world_of()
    world.pools[0].weights["paying"] = 3.0
    leave(world, "paying", 30)
    for _ in range(10):
        asked(world, "free", 12, 12)
    while world.scheduler.unfinished:
        world.step()
        assert cached(world, "paying") == 30
        assert world.pools[0].held <= 10
    world.assert_answered()


def test_beams_and_samples_keep_to_it_too() -> None:
    """C30: a group of several sequences is preempted as one."""
    world = world_of()
    leave(world, "quiet", 14)
    for _ in range(8):
        asked(world, "flood", 10, 16, width=3)
    while world.scheduler.unfinished:
        world.step()
        assert cached(world, "quiet") == 14
    world.assert_answered()
    world.assert_empty()
