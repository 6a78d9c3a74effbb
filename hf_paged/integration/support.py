"""What we leave to stock, and why."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from .slots import slots_of


class FallbackWarning(UserWarning):
    """A call asked for the paged cache and runs on transformers' own instead."""


def why_not(model: Any, generation_config: Any) -> str | None:
    """Why this call cannot run on pages, or None if it can."""
    name = type(model).__name__
    if generation_config.use_cache is False:
        return "use_cache=False leaves nothing to page"
    if "mamba" in name.lower() or not model._supports_default_dynamic_cache():
        return f"{name} keeps a state of its own instead of keys and values"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return f"{name}.forward takes no past_key_values"
    if all(slot.kind is None for slot in slots_of(model, cross=False)):
        return f"no layer of {name} keeps plain keys and values"
    return None


def warn(reason: str) -> None:
    """Say once per place and reason that stock takes over."""
    warnings.warn(f"cache_implementation='paged': {reason}; transformers' own cache is used", FallbackWarning, stacklevel=5)
