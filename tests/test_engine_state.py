"""Methods that run one at a time: what an interrupt has torn is recovered before and after them."""

from __future__ import annotations

import pytest

from hf_paged.engine.fair_lock import FairLock
from hf_paged.engine.state import EngineState, Phase, in_turn


class Owner:
    """Books of which each turn sees whether they are whole."""

    def __init__(self) -> None:
        self.lock, self.state = FairLock(), EngineState()
        self.settled = 0

    def settle(self) -> None:
        assert self.lock.mine
        self.settled += 1
        self.state.torn = False

    @in_turn
    def tear(self) -> None:
        assert not self.state.torn
        self.state.torn = True
        raise KeyboardInterrupt

    @in_turn
    def look(self) -> bool:
        return self.state.torn


def test_torn_books_are_recovered_by_the_turn_that_tears_them() -> None:
    owner = Owner()
    with pytest.raises(KeyboardInterrupt):
        owner.tear()
    assert owner.settled == 1
    assert not owner.look()
    assert owner.settled == 1


def test_books_that_are_found_torn_are_recovered_first() -> None:
    owner = Owner()
    owner.state.torn = True
    assert not owner.look()
    assert owner.settled == 1
    assert not owner.lock.mine
    assert not owner.lock.waiting


@pytest.mark.parametrize("phase", list(Phase))
def test_an_engine_that_closes_settles_in_every_turn(phase: Phase) -> None:
    """The next call does all that an interrupt broke off."""
    owner = Owner()
    owner.state.phase = phase
    owner.look()
    assert bool(owner.settled) == (phase >= Phase.CLOSING)
    assert owner.state.paused == (phase is Phase.PAUSED)
    assert owner.state.closed == (phase >= Phase.CLOSED)
