"""Cases of kernels in which rows begin with the same blocks."""

from __future__ import annotations

import torch
from kernel_cases import DEVICE, GPU, Case

from hf_paged.blocks.shared_reads import SharedReads

Common = list[tuple[list[int], int]]
"""Rows, and the blocks with which all of them begin."""
LONG = 20 if GPU else 1
SHAPES: dict[str, tuple[list[int], Common]] = {
    "one group": ([70 * LONG, 66 * LONG, 90 * LONG], [([0, 1, 2], 4 * LONG)]),
    "an own part of one token": ([65, 66, 80], [([0, 1, 2], 4)]),
    "two groups and rows apart": ([50, 1, 60, 0, 70, 40, 33], [([0, 2], 3), ([4, 5], 2)]),
    "a group in a group": ([90, 99, 80, 70, 40], [([0, 1, 2, 3, 4], 2), ([0, 1], 5), ([2, 3], 4)]),
    "a group of many": ([40 + i for i in range(19)], [(list(range(19)), 2)]),
    "nothing": ([40, 17, 1], []),
}
"""Tokens of rows, and what they have in common."""


def with_common(case: Case, common: Common) -> Case:
    """The case, in which rows begin with the blocks of the first of them."""
    for rows, count in common:
        case.table[rows, :count] = case.table[rows[0], :count]
    return case


def groups_of(case: Case, lengths: list[int] | None = None, new: int = 1) -> torch.Tensor:
    """The groups of a case's tables as the books find them, from one common block on."""
    tables = case.table.tolist()
    before = [max(length - new, 0) for length in lengths or case.lengths]
    books = SharedReads(case.block_size, always=True)
    numbers = books.follow(range(len(before)), before, lambda row, count: tables[row][:count], ())
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE).view(-1, 8)


def random_tree(seed: int, rows: int, several: int = 5) -> tuple[list[int], Common]:
    """Lengths of rows, and at random what up to `several` neighbours have in common; with an odd seed all
    have their first block.
    """
    random = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (), generator=random))

    lengths = [33 + draw(60 * LONG) for _ in range(rows)]
    common: Common = []
    begin = 0
    while begin < rows:
        together = list(range(begin, min(rows, begin + 1 + draw(several))))
        most = min(lengths[row] for row in together) // 16
        common.append((together, 1 + draw(most)))
        begin = together[-1] + 1
    return lengths, common + [(list(range(rows)), 1)] * (seed % 2)
