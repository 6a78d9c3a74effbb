"""The first launch of a step: slots, lengths and columns as the books would say them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, GPU, ints, load

kernels = load()


class Step:
    """The static tensors of a captured step over rows of `lengths`, -1 for those that only fill up the
    batch.
    """

    def __init__(self, lengths: list[int], new: int, block_size: int, spare: int = 0) -> None:
        self.new, self.block_size = new, block_size
        needs = max(-(-(max(length, 0) + 3 * new) // block_size) for length in lengths)
        ids = (
            torch.randperm(len(lengths) * needs, generator=torch.Generator().manual_seed(new)).view(
                len(lengths), needs
            )
            + 5
        )
        wide = torch.full((len(lengths), needs + spare), 2**30, dtype=torch.int32)
        wide[:, :needs] = ids
        self.table = wide.to(DEVICE)[:, :needs]
        self.lengths = ints(lengths)
        self.seen = torch.full_like(self.lengths, 77)
        self.slots = torch.full((len(lengths) * new,), 77, device=DEVICE)
        self.columns = torch.tensor([0, 9], device=DEVICE)

    def advance(self) -> None:
        kernels.advance(
            self.table, self.lengths, self.seen, self.slots, self.columns, self.new, self.block_size
        )

    def expected(self) -> tuple[list[int], list[int], list[int]]:
        """Slots, lengths and seen after the next step."""
        slots, table = [], self.table.tolist()
        for row, length in enumerate(self.lengths.tolist()):
            for at in range(length, length + self.new):
                slots.append(
                    table[row][at // self.block_size] * self.block_size + at % self.block_size
                    if length >= 0
                    else -1
                )
        lengths = [length + self.new if length >= 0 else -1 for length in self.lengths.tolist()]
        return slots, lengths, [max(0, length) for length in lengths]

    def verify(self) -> None:
        (slots, lengths, seen), after = self.expected(), int(self.columns[1])
        self.advance()
        assert self.slots.tolist() == slots
        assert self.lengths.tolist() == lengths
        assert self.seen.tolist() == seen
        assert self.columns.tolist() == [after, after + self.new]


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("new", [1, 3, 16, 64])
def test_steps(new: int, block_size: int) -> None:
    step = Step([15, 0, -1, 16, 1, 255, -1, 31], new, block_size, spare=3)
    for _ in range(3):
        step.verify()


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300])
def test_many_rows(rows: int) -> None:
    Step([(7 * row) % 40 - 1 for row in range(rows)], 1, 16).verify()
    Step([(7 * row) % 40 - 1 for row in range(rows)], 5, 16).verify()


def test_only_filler_rows_and_no_rows() -> None:
    Step([-1, -1], 2, 4).verify()
    none = ints([])
    columns = torch.tensor([3, 4], device=DEVICE)
    kernels.advance(none.view(0, 4), none, none.clone(), none.long(), columns, 2, 4)
    assert columns.tolist() == [4, 6]


def test_a_row_past_its_table_writes_nowhere() -> None:
    lengths, seen, slots = ints([3, 3]), ints([0, 0]), torch.zeros(8, dtype=torch.long, device=DEVICE)
    kernels.advance(
        ints([7, -1]).view(2, 1), lengths, seen, slots, torch.zeros(2, dtype=torch.long, device=DEVICE), 4, 4
    )
    assert slots.tolist() == [31, -1, -1, -1, -1, -1, -1, -1]
    assert lengths.tolist() == seen.tolist() == [7, 7]


def test_slots_past_two_to_the_31() -> None:
    slots = torch.zeros(1, dtype=torch.long, device=DEVICE)
    kernels.advance(
        ints([2**30]).view(1, 1),
        ints([5]),
        ints([0]),
        slots,
        torch.zeros(2, dtype=torch.long, device=DEVICE),
        1,
        16,
    )
    assert slots.tolist() == [2**34 + 5]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no new": ({"new": 0}, "Invalid new 0: expected 1 to 64"),
    "too many new": ({"new": 65}, "Invalid new 65"),
    "block size": ({"block_size": 12}, "Invalid block_size 12: expected a power of two"),
    "table": ({"table": ints([1, 2])}, "Invalid table"),
    "long table": ({"table": torch.zeros(2, 4, dtype=torch.long, device=DEVICE)}, "Invalid table"),
    "lengths": ({"lengths": ints([1])}, r"Invalid shape of lengths: expected \[2\], got \[1\]"),
    "long lengths": ({"lengths": ints([1, 2]).long()}, "Invalid lengths: expected contiguous torch.int32"),
    "seen": ({"seen": ints([1, 2, 3])}, "Invalid shape of seen"),
    "slots": (
        {"slots": torch.zeros(2, dtype=torch.long, device=DEVICE)},
        r"Invalid shape of slots: expected \[6\], got \[2\]",
    ),
    "short slots": ({"slots": ints([0] * 6)}, "Invalid slots: expected contiguous torch.int64"),
    "columns": (
        {"columns": torch.zeros(1, dtype=torch.long, device=DEVICE)},
        r"Invalid shape of columns: expected \[2\], got \[1\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_does_not_fit(name: str) -> None:
    step = Step([1, 2], 3, 4)
    wrong, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        kernels.advance(**{**vars(step), **wrong})


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_captured_step_goes_on() -> None:
    step = Step([15, 0, -1, 16] * 50, 1, 16)
    Step([15, 0, -1, 16] * 50, 1, 16).advance()  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.advance()
    for _ in range(3):
        (slots, lengths, seen), after = step.expected(), int(step.columns[1])
        graph.replay()
        assert (step.slots.tolist(), step.lengths.tolist(), step.seen.tolist()) == (slots, lengths, seen)
        assert step.columns.tolist() == [after, after + 1]
