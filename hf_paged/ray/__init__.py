"""Replicas on Ray: `serve run hf_paged.ray:app`, and `map_batches` for the prompts of a data set.

Needs `pip install 'hf_paged[ray]'`. Ray is imported when one of the two is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .application import app
    from .batches import map_batches

__all__ = ["app", "map_batches"]
MODULES = {"app": "application", "map_batches": "batches"}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, expected one of {__all__}")
    try:
        return getattr(import_module(f".{MODULES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"hf_paged.ray needs {error.name}: pip install 'hf_paged[ray]'") from error
