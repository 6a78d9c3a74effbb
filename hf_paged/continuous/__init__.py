"""transformers' continuous batching (`model.generate_batch` and its manager), computed by the engine."""

from .install import install, transformers_main, uninstall
from .manager import EngineBatchingManager

__all__ = ["EngineBatchingManager", "install", "transformers_main", "uninstall"]
