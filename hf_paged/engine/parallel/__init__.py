"""One engine on several ranks: rank 0 schedules and samples, all compute."""

from .follower import Follower
from .joining import load_alike, made_alike, ranks_of, tried_alike, why_not_on_ranks
from .leader import Leader
from .ranks import RankError, Ranks

__all__ = [
    "Follower",
    "Leader",
    "RankError",
    "Ranks",
    "load_alike",
    "made_alike",
    "ranks_of",
    "tried_alike",
    "why_not_on_ranks",
]
