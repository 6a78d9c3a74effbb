"""Adapters that begin in the middle of a prompt: aLoRA, from its invocation tokens on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Invocation = tuple[int, ...]
"""The tokens with which an adapter begins; none for one that computes all tokens."""


def invocation_in(config: Any) -> Invocation:
    """The invocation tokens of an adapter with this config of peft's."""
    return tuple(getattr(config, "alora_invocation_tokens", None) or ())


def start_of(ids: Sequence[int], invocation: Invocation) -> int | None:
    """The place where the last occurrence of an adapter's invocation tokens begins; None if there is none."""
    count = len(invocation)
    last = len(ids) - count
    return next((i for i in range(last, -1, -1) if tuple(ids[i : i + count]) == invocation), None)
