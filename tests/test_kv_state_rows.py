"""Slots of recurrent states: random walks beside the tokens that each row's state should be behind (C4, C7)."""

from __future__ import annotations

import random

import pytest
import torch

from hf_paged.blocks import OutOfBlocks, State
from hf_paged.kv import Memory, Sequences
from hf_paged.kv.config import CacheConfig
from hf_paged.kv.layout import StateLayout
from hf_paged.kv.state_rows import NO_SLOT, StateRows

LAYOUT = StateLayout.of(torch.zeros(1, 1, dtype=torch.float64))


def make_rows(slots: int | None = None) -> StateRows:
    memory = Memory()
    group = memory.group(State(), CacheConfig(state_slots=slots), 1, 1.0)
    group.place("state", LAYOUT)
    (rows,) = Sequences(memory, {State(): group}).rows.values()
    assert isinstance(rows, StateRows)
    return rows


class Walk:
    """Rows whose state is a number that every token changes, in slots and by hand."""

    def __init__(self, seed: int, slots: int | None) -> None:
        self.chance = random.Random(seed)
        self.rows = make_rows(slots)
        self.held: list[float] = []
        self.before: list[float] | None = None
        """The states before the last step, if it can be taken back."""
        self.tokens = 0

    def step(self) -> None:
        rows = len(self.held) or self.chance.randint(1, 4)
        self.rows.take(rows, self.chance.randint(1, 3))
        apart = set(self.rows.read).isdisjoint(self.rows.written)
        self.before = list(self.held) if apart and self.held else None
        self.held = self.held or [0.0] * rows
        self.run(apart)

    def run(self, again: bool) -> None:
        """Run the step; twice, if that leaves the same."""
        self.tokens += 1
        for _ in range(1 + again):
            store, place = self.rows.group.store("state")
            slots = torch.tensor(self.rows.read)
            old = store.read(place, slots)[:, 0].where(slots != NO_SLOT, torch.zeros(()))
            new = 3 * old + self.tokens + torch.arange(len(slots))
            store.write(place, torch.tensor(self.rows.written), new[:, None])
        self.held = [3 * state + self.tokens + row for row, state in enumerate(self.held)]

    def take_back(self) -> None:
        if self.before is not None:
            self.rows.return_to(self.rows.begun, None)
            self.held, self.before = self.before, None

    def reorder(self) -> None:
        if self.held:
            sources = [self.chance.randrange(len(self.held)) for _ in range(self.chance.randint(1, 4))]
            if sources != list(range(len(self.held))):
                self.before = None
            self.rows.reorder(sources)
            self.held = [self.held[source] for source in sources]

    def fork(self) -> None:
        if self.held:
            twin = self.rows.fork()
            self.rows.free()
            self.rows, self.before = twin, None

    def end(self) -> None:
        self.rows.return_to(0, None)
        self.held, self.before = [], None

    def check(self) -> None:
        self.rows.group.memory.check()
        if self.held:
            store, place = self.rows.group.store("state")
            assert store.read(place, torch.tensor(self.rows.written))[:, 0].tolist() == self.held
        used = (
            {slot for slot in (*self.rows.written, *self.rows.read) if slot != NO_SLOT}
            if self.held
            else set()
        )
        free = set(range(self.rows.group.pool.total)) - used
        if self.rows.group.stores and self.before is not None:
            for slot in free:
                store.of_layer[0][slot] = float("nan")  # what is given back is read by nobody


@pytest.mark.parametrize("slots", [None, 8, 5])
@pytest.mark.parametrize("seed", range(8))
def test_states_follow_their_rows(seed: int, slots: int | None) -> None:
    walk = Walk(seed, slots)
    for _ in range(40):
        moves = [walk.step, walk.step, walk.step, walk.take_back, walk.reorder, walk.fork, walk.end]
        try:
            walk.chance.choice(moves)()
        except OutOfBlocks:
            assert slots is not None
            walk.end()
        walk.check()
    walk.rows.free()
    assert walk.rows.group.pool.held == 0


def test_a_pool_that_grows_with_its_rows() -> None:
    """Without snapshots it doubles; rows that leave some have as many slots more as the option says."""
    sizes = []
    for kept in (False, True):
        rows = make_rows()
        rows.group.config = CacheConfig(state_snapshots=5)
        rows.keeps_prefixes = kept
        for _ in range(3):
            rows.take(2, 1)
        sizes.append(rows.group.pool.total)
        rows.free()
    assert sizes == [4, 9]


def test_a_pool_with_room_for_one_slot_a_row_writes_in_place() -> None:
    rows = make_rows(2)
    rows.take(2, 5)
    assert rows.read == (NO_SLOT, NO_SLOT)
    rows.take(2, 1)
    assert rows.read == rows.written
    with pytest.raises(RuntimeError, match="a recurrent state covers all 6"):
        rows.return_to(5, None)
    rows.free()


def test_a_pool_without_room_says_how_many_slots_are_needed() -> None:
    rows = make_rows(2)
    with pytest.raises(OutOfBlocks, match=r"3 more .* 2 of 2 are free \(state_slots=2"):
        rows.take(3, 5)
    assert rows.group.pool.held == 0


def test_rows_alone_take_turns_between_two_slots() -> None:
    """Each row goes on with the two slots that it has; one that others hold is never written."""
    rows = make_rows()
    for _ in range(2):
        rows.take(3, 1)
    read, written = rows.read, rows.written
    rows.take(3, 1)
    assert (rows.read, rows.written) == (written, read)
    rows.return_to(rows.begun, None)
    assert rows.written == written
    rows.take(3, 1)
    twin = rows.fork()
    rows.take(3, 1)
    assert rows.read == twin.written
    assert not {*rows.written} & {*twin.written}
    rows.group.pool.check()
    twin.free()
    rows.free()
    rows.group.pool.check()
