"""Steps that may run again and steps that may not: the slots of states, and what a run over them may find."""

from __future__ import annotations

import pytest
from counted_states import CountedStates

from hf_paged.model.state_slots import NO_SLOT, StateRow, StatesAdvanced, StateSlots, rows_at, states_of


@pytest.mark.parametrize(
    ("read", "written", "repeatable"),
    [
        ((), (), True),
        ((NO_SLOT,), (3,), True),
        ((1, 2), (3, 4), True),
        ((1,), (1,), False),
        ((1, 2), (3, 2), False),
        ((1, 1), (2, 3), True),  # a fork
        ((1, 2), (2, 1), False),
    ],
)
def test_a_step_is_repeatable_while_no_row_writes_what_a_row_reads(
    read: tuple[int, ...], written: tuple[int, ...], repeatable: bool
) -> None:
    assert StateSlots(read, written).repeatable is repeatable


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_different_slots_may_run_any_number_of_times(runs: int) -> None:
    states = CountedStates(in_place=False)
    for start, tokens in ((0, [5, 6]), (2, [7]), (3, [8, 9])):
        rows = [StateRow("a", start, len(tokens))]
        for _ in range(runs):
            assert states.may_run(rows)
            states.begin(rows)
            states.advance([0], [tokens])
    assert states.content[states.slots.written[0]] == (5, 6, 7, 8, 9)


def test_equal_slots_run_once() -> None:
    """Also where the run broke off before it wrote anything: how far it came is not known."""
    states = CountedStates(in_place=True)
    prompt = [StateRow("a", 0, 2)]
    for _ in range(2):  # reads nothing
        states.begin(prompt)
        states.advance([0], [[5, 6]])
    step = [StateRow("a", 2, 1)]
    assert states.may_run(step)
    states.begin(step)
    assert not states.may_run(step)
    with pytest.raises(
        StatesAdvanced, match="a run of 1 tokens behind 2 would read a recurrent state behind 3"
    ):
        states.begin(step)
    states.advance([0], [[7]])
    states.begin([StateRow("a", 3, 1)])
    assert states.content[states.slots.read[0]] == (5, 6, 7)


def test_one_row_that_may_not_run_is_enough() -> None:
    states = CountedStates(in_place=True)
    states.begin([StateRow("a", 0, 2)])
    with pytest.raises(StatesAdvanced):
        states.begin([StateRow("b", 0, 4), StateRow("a", 1, 1)])
    assert states.rows == [("a", 0, 2)], "a refused run changes nothing"
    with pytest.raises(StatesAdvanced, match="behind 0"):
        states.begin([StateRow("c", 9, 1)])  # a prefix without its state


class Named(CountedStates):
    """Slots as a test names them."""

    def __init__(self, slots: StateSlots) -> None:
        super().__init__(True)
        self.named = slots
        self.tokens = dict.fromkeys(range(9), 4)

    def slots_of(self, rows: object) -> StateSlots:
        return self.named


@pytest.mark.parametrize(
    "slots", [StateSlots((1, 2), (2, 3)), StateSlots((1, 1), (1, 2)), StateSlots((1, 2), (3, 3))]
)
def test_no_row_writes_what_another_row_uses(slots: StateSlots) -> None:
    with pytest.raises(ValueError, match="which another row of its step uses"):
        Named(slots).begin(rows_at(4, 2, 1))


def test_a_cache_without_slots_has_no_states() -> None:
    assert states_of([object()]) is None
