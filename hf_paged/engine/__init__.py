"""The engine: many requests at once on one model as it is, over the same pages as generate()."""

from .config import EngineConfig, EngineOptions
from .engine import Engine
from .outputs.handle import Handle
from .outputs.output import Increment, Output, SequenceOutput, Timing, TokenLogprob
from .parallel import RankError
from .requests.keywords import RequestKeywords
from .support import Unservable

__all__ = [
    "Engine", "EngineConfig", "EngineOptions", "Handle", "Increment", "Output", "RankError",
    "RequestKeywords", "SequenceOutput", "Timing", "TokenLogprob", "Unservable",
]  # fmt: skip
