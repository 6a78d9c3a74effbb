"""Progress of many requests: a bar, or a function of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from ...model.loading import is_watched

LONG_WORK = 3.0
"""Seconds after which a bar shows by itself, in a terminal or a notebook."""
Total = TypeVar("Total")
Progress = bool | Callable[[int, Total], object] | None
"""True for a bar, False for none, None for one after a while; or a function of the number of requests that
have ended and of all: an int, or None where that is not known.
"""


@contextmanager
def shown(progress: Progress[Any], total: int | None) -> Iterator[Callable[[int], object]]:
    """Show progress until the block ends: by a function of the number of requests that have ended."""
    if callable(progress):
        yield lambda ended: progress(ended, total)
        return
    disabled = progress is False or (progress is None and not is_watched())
    with tqdm(total=total, unit="request", delay=0 if progress else LONG_WORK, disable=disabled) as bar:
        yield lambda ended: bar.update(ended - bar.n)
