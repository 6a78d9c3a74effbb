"""Shared by the tests: one_request."""

from __future__ import annotations

import random

from hf_paged.scheduling import Request


def one_request(rng: random.Random, number: int) -> Request:
    """Prompts that often begin alike."""
    shared = [1, 2, 3, 1, 2, 3, 4, 5, 6, 1, 2, 2][: rng.randrange(13)]
    prompt = (*shared, *(rng.randrange(3) for _ in range(rng.randrange(1, 9))))
    return Request(
        number,
        prompt,
        len(prompt) + rng.randrange(1, 12),
        rng.choice([1, 1, 1, 2, 3]),
        rng.randrange(3),
        rng.choice([b"", b"x"]),
    )
