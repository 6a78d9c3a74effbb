"""Captured steps' spans: several tokens a row, laid out from the table of rows."""

from __future__ import annotations

import random

import pytest
import torch
from static_batches import CPU, make_group, rows_in_array, sequences, static_batch, write

from hf_paged.blocks import BlockPool, BlockTable
from hf_paged.kv import StaticSpans


@pytest.mark.parametrize("spans", [False, True])
def test_rows_of_one_token_and_a_chunk_behind_them(spans: bool) -> None:
    """Rows in any order of the array: every token's position, blocks and slot."""
    chance, pool = random.Random(3), BlockPool(200, 4)
    tables = [BlockTable(pool) for _ in range(7)]
    for table in tables:
        table.append(chance.randrange(10, 60))
    tables[2].release_before(9)
    batch = StaticSpans(12, 9, 17, 4, 1, CPU) if spans else static_batch(12, 1, 4)
    batch.load_array(*rows_in_array(tables, [1] * 6 + [3], [4, 0, 9, 2, 6, 5, 1]))
    assert batch.tokens.tolist()[:7] == [*(table.length - 1 for table in tables[:6]), tables[6].length - 3]
    if isinstance(batch, StaticSpans):
        assert batch.spans.totals.tolist() == [*(table.length for table in tables), 0, 0]
        assert batch.spans.borders.tolist() == [*range(7), 9, 9, 9]
    for row, table in enumerate(tables):
        assert batch.table(CPU)[row, table.released : table.end].tolist() == table.blocks
    slots = [table.slot(table.length - 1) for table in tables[:6]] + [
        tables[6].slot(tables[6].length - i) for i in (3, 2, 1)
    ]
    group = make_group()
    write(group, sequences(group).extend(group.kind, 1, 1), torch.ones(1, 1))
    batch.begin(group.captured_ops.advance)
    assert batch.targets(CPU).tolist() == [*slots, -1, -1, -1]
