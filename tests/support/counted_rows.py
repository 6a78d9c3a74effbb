"""Shared by the tests: counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def counted(model: Any) -> Iterator[list[tuple[int, int]]]:
    """The (rows, tokens) of everything that enters the first decoder layer."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None) or decoder.block
    seen: list[tuple[int, int]] = []
    handle = layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple((*args, *kwargs.values())[0].shape[:2])),
        with_kwargs=True,
    )
    try:
        yield seen
    finally:
        handle.remove()
