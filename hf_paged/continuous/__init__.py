"""transformers' continuous batching (`model.generate_batch` and its manager), computed by the engine."""

from .install import install, transformers_main, uninstall

__all__ = ["install", "transformers_main", "uninstall"]
