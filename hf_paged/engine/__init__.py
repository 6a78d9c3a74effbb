"""The engine: many requests at once on one model as it is, over the same pages as generate()."""

from .config import EngineConfig
from .engine import Engine
from .handle import Handle
from .output import Increment, Output, SequenceOutput, Timing, TokenLogprob
from .support import Unservable

__all__ = ["Engine", "EngineConfig", "Handle", "Increment", "Output", "SequenceOutput", "Timing", "TokenLogprob", "Unservable"]
