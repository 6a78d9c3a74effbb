"""Which replica gets a request: the one that holds the longest prefix of it, within a bound on its load."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CAPACITY = 16_384
"""Blocks that a replica is taken to hold until it reports the size of its pool."""


@dataclass(frozen=True)
class LoadBound:
    """How much busier than the others a replica may be and still get the requests whose prefix it holds.

    ratio: its requests under way over the mean of all replicas. free: with this many or fewer it is never too
    busy, because a step computes them side by side. least_share: a shorter prefix, as a share of the prompt's
    blocks, is no reason to prefer a replica.
    """

    ratio: float = 1.25
    free: int = 4
    least_share: float = 0.25

    def __post_init__(self) -> None:
        if not self.ratio >= 1:
            raise ValueError(f"ratio={self.ratio} excludes replicas of the mean load; give 1 or more")
        if self.free < 0:
            raise ValueError(f"free={self.free} is not a number of requests; give 0 or more")
        if not 0 <= self.least_share <= 1:
            raise ValueError(f"least_share={self.least_share} is not a share; give 0 to 1")

    def most(self, loads: Mapping[str, int]) -> int:
        """The requests that a replica may have with the next one among them."""
        mean = (sum(loads.values()) + 1) / len(loads)
        return max(self.free, math.ceil(self.ratio * mean))


class PrefixIndex:
    """Prompts sent to each replica, by names of blocks.

    Each replica's entries are bounded by the blocks of its pool. The least recently used one is forgotten
    first, as its own cache evicts. A block is used after those behind it, so the held names of a prompt are
    its first ones.
    """

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[bytes, None]] = {}
        self._capacity: dict[str, int] = {}

    def keep(self, replicas: Mapping[str, int | None]) -> None:
        """Forget all other replicas; with the capacity of these, as far as it is known."""
        self._held = {each: self._held.get(each, OrderedDict()) for each in replicas}
        self._capacity = {each: most or CAPACITY for each, most in replicas.items()}

    def forget(self, replica: str) -> None:
        """The replica holds nothing any more."""
        self._held.pop(replica, None)

    def add(self, replica: str, digests: Sequence[bytes]) -> None:
        """A prompt was sent to a replica."""
        held = self._held.setdefault(replica, OrderedDict())
        for digest in reversed(digests):
            held[digest] = None
            held.move_to_end(digest)
        for _ in range(len(held) - self._capacity.get(replica, CAPACITY)):
            held.popitem(last=False)

    def match(self, replica: str, digests: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks a replica holds."""
        held = self._held.get(replica)
        return bisect_left(digests, True, key=lambda digest: digest not in held) if held else 0


def ranked(
    digests: Sequence[bytes],
    loads: Mapping[str, int],
    index: PrefixIndex,
    bound: LoadBound,
    draw: random.Random,
) -> list[list[str]]:
    """Replicas for a prompt, the best ones first; of a rank the least loaded one is taken.

    First those that hold the longest prefix and are not too busy. Then two at random (power of two choices),
    which balances load nearly as well as a look at all of them. Then all. loads: requests under way.
    """
    ranks = []
    matches = {replica: index.match(replica, digests) for replica in loads}
    most = bound.most(loads)
    holders = [
        replica
        for replica, match in matches.items()
        if match and match >= bound.least_share * len(digests) and loads[replica] < most
    ]
    if holders:
        longest = max(matches[replica] for replica in holders)
        ranks.append([replica for replica in holders if matches[replica] == longest])
    everything = list(loads)
    ranks.append(draw.sample(everything, min(2, len(everything))))
    ranks.append(everything)
    return ranks
