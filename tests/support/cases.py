"""Fewer cases of tests: combinations of parameters that cover them, and how many random ones there are."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

MORE = float(os.environ.get("HF_PAGED_EXAMPLES", "1"))
"""The factor of all random examples and walks: HF_PAGED_EXAMPLES=10 for a long run."""


def examples(count: int) -> int:
    return max(1, round(count * MORE))


def once_each(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which each value of each parameter is there: for parameters that have nothing to do with each other."""
    return [tuple(values[i % len(values)] for values in parameters) for i in range(max(map(len, parameters)))]


def every_other(first: Sequence[Any], second: Sequence[Any], every: int = 2) -> list[tuple[Any, Any]]:
    """Half of all cases, as the black squares of a board: each value meets half of the other parameter's. every: 3 for a
    third, and so on.
    """
    return [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if (i + j) % every == 0]


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which each pair of values of two parameters is there."""
    every = list(itertools.product(*(range(len(values)) for values in parameters)))
    missing = {pair for case in every for pair in _pairs(case)}
    found = []
    while missing:
        best = max(every, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        found.append(tuple(values[i] for values, i in zip(parameters, best, strict=True)))
    return found


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(case), 2))
