"""Paged key-value blocks for transformers: in stock generate(), and in a continuous-batching engine.

    import hf_paged
    model.generate(**inputs, num_beams=4, cache_implementation="paged")

Importing the package is enough: stock generate() then takes "paged" in every mode, with the same tokens.
"""

from hf_paged_cli import __version__ as __version__

from . import trace
from .blocks import OutOfBlocks
from .checking import LogprobGap, Mismatch, RowMismatch, check_mismatch
from .continuous import install, uninstall
from .engine import Engine, EngineConfig, Handle, Increment, Output, SequenceOutput
from .generate.cache import PagedCache
from .generate.install import installed
from .generate.stats import Stats, stats
from .kv.config import CacheConfig
from .model.invariant.known import NotInvariant
from .model.invariant.mode import batch_invariant
from .model.registry import invalidate, release
from .model.replayed_routing import replay_routing
from .model.support import FallbackWarning

__all__ = [
    "CacheConfig", "Engine", "EngineConfig", "FallbackWarning", "Handle", "Increment", "LogprobGap",
    "Mismatch", "NotInvariant", "OutOfBlocks", "Output", "PagedCache", "RowMismatch", "SequenceOutput",
    "Stats", "batch_invariant", "check_mismatch", "install", "installed", "invalidate", "release",
    "replay_routing", "stats", "trace", "uninstall",
]  # fmt: skip

install()
