"""One engine on several ranks: rank 0 schedules and samples, all compute."""

from torch import nn

from ..worker.config import EngineConfig
from ..worker.executor import Executor
from .follower import Follower
from .joining import ranks_of, why_not_on_ranks
from .leader import Leader
from .ranks import RankError, Ranks

__all__ = ["RankError", "Ranks", "executor_of", "why_not_on_ranks"]


def executor_of(model: nn.Module, config: EngineConfig) -> Executor:
    """The executor of a model: one process has all of it, or this is one of several ranks."""
    ranks = ranks_of(model, config)
    if ranks is None:
        return Executor()
    return Leader(ranks) if ranks.leads else Follower(ranks)
