"""The name of a cache among the arguments and answers of a forward: transformers 5.24 has renamed it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationMixin

OLDER = "past_key_values"
_prepares = inspect.signature(GenerationMixin.prepare_inputs_for_generation)
CACHE = "cache" if "cache" in _prepares.parameters else OLDER
"""Its name in this release."""
NAMES = frozenset({CACHE, OLDER})
"""Names that callers may write: the older one still means the same."""


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments, None if there is none."""
    found = arguments.get(CACHE)
    return arguments.get(OLDER) if found is None else found


def named_as_now(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the cache under the name of this release."""
    if OLDER == CACHE or OLDER not in arguments or CACHE in arguments:
        return arguments
    return {CACHE if name == OLDER else name: value for name, value in arguments.items()}
