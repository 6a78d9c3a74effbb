"""The name of a cache among the arguments and answers of a forward: transformers 5.24 has renamed it.

A paged cache has both names in all releases: callers pass and read it as `cache`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from transformers import GenerationMixin

from .caller import caller_level

OLDER = "past_key_values"
NEWER = "cache"
_prepares = inspect.signature(GenerationMixin.prepare_inputs_for_generation)
CACHE = NEWER if NEWER in _prepares.parameters else OLDER
"""Its name in this release."""
NAMES = frozenset({CACHE, OLDER})
"""Names that callers may write: the older one still means the same."""


FOR_STATES = "cache_params"
"""Its name in forwards of models that only have recurrent states, before transformers 5.24 (Mamba)."""


def name_in(model: Any) -> str:
    """The name of the cache among the arguments of a model's forward."""
    names = parameters_of(type(model).forward)
    return FOR_STATES if FOR_STATES in names and NAMES.isdisjoint(names) else CACHE


@functools.cache
def parameters_of(forward: Any) -> Collection[str]:
    """The parameters of a class's forward."""
    return inspect.signature(forward).parameters.keys()


def renamed(arguments: dict[str, Any], name: str, new: str) -> dict[str, Any]:
    """Arguments with one under another name."""
    if name == new or name not in arguments or new in arguments:
        return arguments
    return {new if each == name else each: value for each, value in arguments.items()}


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments, None if there is none."""
    given = (arguments.get(name) for name in (CACHE, OLDER, FOR_STATES))
    return next((each for each in given if each is not None), None)


def named_as_now(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the cache under the name of this release."""
    return renamed(arguments, OLDER, CACHE)


def named_by_caller(arguments: dict[str, Any], owner: Any) -> dict[str, Any]:
    """The arguments of an owner's generate() with the cache under the name of this release.

    The warning about the older name is transformers' own, but for its line: theirs would be hf_paged's.
    """
    if CACHE == OLDER:
        return renamed(renamed(arguments, NEWER, OLDER), OLDER, name_in(owner))
    changed = named_as_now(arguments)
    if changed is not arguments:
        warnings.warn(
            f"`{OLDER}` is deprecated and will be removed in version 6.0.0 for "
            f"`{type(owner).__name__}.generate`. Use `{CACHE}` instead.",
            FutureWarning,
            stacklevel=caller_level(),
        )
    return changed


def add_newer_name(answer: Any) -> None:
    """Let an answer of generate() have its cache under both names, also in releases that have one."""
    if CACHE == OLDER:
        answer.cache = answer.past_key_values
