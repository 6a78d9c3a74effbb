"""The engine: many requests at once on one model as it is, over the same pages as generate()."""

from ..model.servable import Unservable
from .batches import Answers
from .engine import Engine
from .handle import Handle
from .outputs.output import Increment, Output, SequenceOutput, Timing, TokenLogprob
from .parallel import RankError
from .requests.keywords import RequestKeywords
from .requests.prompts import Conversation
from .stats import EngineStats
from .worker.config import EngineConfig, EngineOptions

__all__ = [
    "Answers", "Conversation", "Engine", "EngineConfig", "EngineOptions", "EngineStats", "Handle",
    "Increment", "Output", "RankError", "RequestKeywords", "SequenceOutput", "Timing", "TokenLogprob",
    "Unservable",
]  # fmt: skip
