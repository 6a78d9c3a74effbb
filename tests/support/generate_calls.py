"""Shared by the tests: call."""

from __future__ import annotations

from typing import Any

import torch


def call(ids: torch.Tensor, **arguments: Any) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 8,
        "do_sample": False,
        **arguments,
    }
