"""The engine: many requests at once on one model as it is, over the same pages as generate()."""

from .config import EngineConfig, EngineOptions
from .engine import Engine
from .handle import Handle
from .keywords import RequestKeywords
from .output import Increment, Output, SequenceOutput, Timing, TokenLogprob
from .support import Unservable

__all__ = [
    "Engine", "EngineConfig", "EngineOptions", "Handle", "Increment", "Output", "RequestKeywords", "SequenceOutput", "Timing",
    "TokenLogprob", "Unservable",
]  # fmt: skip
