"""A call of any mode leaves a cache that is right to go on from: drafts that were refused, beams that were
dropped, chunks, padding (C17, C22).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import BY_NAME, build
from modes import MODES
from prefix_reuse import ask, continued, words


def said(arguments: dict[str, Any], answer: Any, row: int) -> torch.Tensor:
    """The tokens of a row of an answer [1, tokens], without padding before and behind them."""
    tokens = (answer if isinstance(answer, torch.Tensor) else answer.sequences)[row]
    mask = arguments.get("attention_mask")
    if mask is not None:
        tokens = tokens[int((mask[row * len(mask) // answer_rows(answer)] == 0).sum()) :]
    padding = (tokens == 0).nonzero()
    return tokens[None, : int(padding[0]) if len(padding) else None]


def answer_rows(answer: Any) -> int:
    return len(answer if isinstance(answer, torch.Tensor) else answer.sequences)


WINDOWED = ("greedy-padded", "beams", "beam-sample", "prompt-lookup", "chunks")


@pytest.mark.parametrize(
    ("name", "mode"), [*(("llama", mode) for mode in MODES), *(("gemma3", mode) for mode in WINDOWED)]
)
def test_going_on_from_an_answer(name: str, mode: str) -> None:
    """The first and the last row of the answer, three tokens on: stock's answer, scores included, and most of
    it found.
    """
    model = build(BY_NAME[name])
    object.__setattr__(model, "assistant", build(BY_NAME[name]))
    first = words(3, 21)
    arguments = {"input_ids": first} | MODES[mode](model, first)
    torch.manual_seed(0)
    options = {"block_size": 4, "prefix_caching": True}
    answer = model.generate(**copy.copy(arguments), cache_implementation="paged", cache_config=options)
    rows = [said(arguments, answer, row) for row in (0, answer_rows(answer) - 1)]
    del answer
    for row in rows:
        longer = continued(row, row.shape[1], 3)
        _, seen = ask(model, longer, 4, return_dict_in_generate=True, output_scores=True)
        assert seen[0] < longer.shape[1] - 12  # its prompt at least
