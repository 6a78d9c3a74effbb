"""The rows of one forward: where the last tokens of rows are."""

from __future__ import annotations

from array import array

import torch
from interrupting import Interrupted

from hf_paged.engine.worker.forward_batch import LastTokens


def test_the_places_of_rows_survive_an_interrupt() -> None:
    """Rows whose places were being looked up are looked up again."""

    def write(last: LastTokens, rows: list[int], tokens: list[int]) -> None:
        last.tokens[last.index_of(array("i", rows))] = torch.tensor(tokens)

    at = 0
    reached = True
    while reached:
        at += 1
        last = LastTokens(4, torch.device("cpu"))
        write(last, [0, 2], [7, 8])
        reached = not Interrupted(at, ("/forward_batch.py", "/upload.py"))(
            lambda last=last: write(last, [1, 3], [5, 6])
        )
        write(last, [1, 3], [5, 6])
        assert last.tokens.tolist() == [7, 5, 8, 6]
    assert at > 5
