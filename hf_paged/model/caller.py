"""The line that a warning names: the caller's own."""

from __future__ import annotations

import sys

LIBRARIES = frozenset({"hf_paged", "transformers", "torch", "peft", "accelerate"})
"""Packages through which a caller's line comes here."""


def caller_level() -> int:
    """The `stacklevel`, for a warning of the function that calls this, of the first line outside the
    libraries; without one, of the outermost line.
    """
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in LIBRARIES:
        frame = frame.f_back
        level += 1
    return level


def _package(namespace: dict[str, object]) -> str:
    return str(namespace.get("__name__")).partition(".")[0]
