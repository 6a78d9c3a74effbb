"""Adapters that begin in the middle of a prompt: aLoRA, from its invocation tokens on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

Invocation = tuple[int, ...]
"""The tokens with which an adapter begins; none for one that computes all tokens."""


def invocation_in(config: Any) -> Invocation:
    """The invocation tokens of an adapter with this config of peft's."""
    return tuple(getattr(config, "alora_invocation_tokens", None) or ())


def invocation_of(source: Any, config: Any, name: str) -> Invocation:
    """The same of an adapter as `load_adapter` reads it."""
    if config is None and isinstance(source, (str, os.PathLike)):
        import peft

        config = peft.PeftConfig.from_pretrained(os.fspath(source))
    configs = getattr(source, "peft_config", None)
    return invocation_in(configs[name] if isinstance(configs, Mapping) else config)


def start_of(ids: Sequence[int], invocation: Invocation) -> int | None:
    """The place where the last occurrence of an adapter's invocation tokens begins; None if there is none."""
    count = len(invocation)
    last = len(ids) - count
    return next((i for i in range(last, -1, -1) if tuple(ids[i : i + count]) == invocation), None)
