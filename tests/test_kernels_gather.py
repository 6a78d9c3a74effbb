"""The dense copy of pages: every token in its column, zeros before a row's start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_cases import DEVICE, GPU, ints, load

kernels = load()


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Pages:
    """One layer's pages, NaN in the blocks that no table names; the table is cut out of a wider one."""

    def __init__(
        self,
        rows: int,
        width: int,
        page: int,
        heads: int,
        dim: int,
        by_head: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        random = torch.Generator().manual_seed(rows)
        blocks = rows * width + 3
        data = torch.randn(blocks, heads, page, dim, generator=random).to(dtype).transpose(1, 2)
        order = torch.randperm(blocks, generator=random)
        data[order[rows * width :]] = torch.nan
        self.data = (data if by_head else data.contiguous()).to(DEVICE)
        wide = torch.full((rows, width + 2), 2**30, dtype=torch.int32)
        wide[:, :width] = order[: rows * width].view(rows, width)
        self.table = wide.to(DEVICE)[:, :width]

    def verify(self, starts: list[int] | None, first: int, columns: int) -> None:
        got = kernels.gather(self.data, self.table, None if starts is None else ints(starts), first, columns)
        page, heads, dim = self.data.shape[1:]
        expected = torch.zeros(
            self.table.shape[0], heads, columns - first, dim, dtype=self.data.dtype, device=DEVICE
        )
        for row, ids in enumerate(self.table.tolist()):
            start = starts[row] if starts else 0
            for column in range(max(first, start), min(columns, start + page * len(ids))):
                expected[row, :, column - first] = self.data[
                    ids[(column - start) // page], (column - start) % page
                ]
        assert got.is_contiguous()
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("rows", "width", "page", "heads", "dim", "by_head"), [
    (1, 1, 16, 1, 16, False), (3, 4, 16, 2, 80, True), (2, 70, 1, 3, 96, False), (4, 3, 4, 2, 8, True),
    (2, 1, 256, 2, 128, False), (1, 6, 32, 1, 576, True),
])  # fmt: skip
def test_gather(rows: int, width: int, page: int, heads: int, dim: int, by_head: bool) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        pages, columns = Pages(rows, width, page, heads, dim, by_head, dtype), width * page
        pages.verify(None, 0, columns)
        pages.verify(None, columns // 3, columns - columns // 4)
        pages.verify([3 * row for row in range(rows)], columns // 5, columns)


def test_starts() -> None:
    pages = Pages(4, 3, 4, 2, 16)
    pages.verify([0, 5, 12, 2], 0, 12)
    pages.verify([0, 5, 12, 2], 7, 14)
    pages.verify([20, 20, 20, 20], 3, 12)


def test_columns_past_the_table_and_blocks_that_are_not_there_are_zero() -> None:
    pages = Pages(2, 2, 4, 2, 16)
    pages.verify(None, 0, 20)
    pages.table[1, 1] = -1
    assert kernels.gather(pages.data, pages.table, None, 0, 8)[1, :, 4:].count_nonzero() == 0


def test_nothing_to_gather() -> None:
    pages = Pages(2, 2, 4, 2, 16)
    assert kernels.gather(pages.data, pages.table, None, 5, 5).shape == (2, 2, 0, 16)
    assert kernels.gather(pages.data, pages.table[:0], None, 0, 5).shape == (0, 2, 5, 16)


def test_refuses_what_does_not_fit() -> None:
    pages = Pages(2, 2, 4, 2, 16)
    with pytest.raises(
        ValueError, match=r"Invalid shape of data: expected \[blocks, block_size, heads, dim\]"
    ):
        kernels.gather(pages.data[0], pages.table, None, 0, 4)
    with pytest.raises(ValueError, match="Invalid shape of data"):
        kernels.gather(pages.data.transpose(2, 3), pages.table, None, 0, 4)
    with pytest.raises(ValueError, match="Invalid table"):
        kernels.gather(pages.data, pages.table.long(), None, 0, 4)
    with pytest.raises(
        ValueError, match=r"Invalid shape of starts: expected \[2\] of torch.int32, got \[3\]"
    ):
        kernels.gather(pages.data, pages.table, ints([0, 0, 0]), 0, 4)
    with pytest.raises(ValueError, match="Invalid first 5: expected 0 to 4"):
        kernels.gather(pages.data, pages.table, None, 5, 4)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_large_gather() -> None:
    Pages(16, 20, 16, 8, 128, True, torch.bfloat16).verify([7 * row for row in range(16)], 0, 320)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_blocks_past_two_to_the_31() -> None:
    blocks = 2**31 // (16 * 8 * 128) + 2
    data = torch.zeros(blocks, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    data[-1, -1] = 7
    assert (kernels.gather(data, ints([blocks - 1]).view(1, 1), None, 15, 16) == 7).all()
