"""Requests of given lengths, made from a seed: lognormal, with the means of the PagedAttention paper's figure
11.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

TRACES = {"sharegpt": (161, 338, 1.0, 1024), "alpaca": (19, 58, 0.8, 512)}
"""The mean length of prompts and of answers, the spread of their logarithm, and the longest."""


class Ask(NamedTuple):
    """A request: what it says, and how many tokens are wanted."""

    prompt: list[int]
    new: int


def trace(name: str, count: int, vocabulary: int, seed: int = 0) -> list[Ask]:
    """`count` requests of a trace."""
    prompt, answer, spread, most = TRACES[name]
    rng = random.Random(seed)

    def length(mean: float) -> int:
        return min(most, max(4, int(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread))))

    return [
        Ask([rng.randrange(10, vocabulary - 10) for _ in range(length(prompt))], length(answer))
        for _ in range(count)
    ]
