"""Shared by the tests: attention, deepseek, expanded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import build, config_class


def deepseek() -> Any:
    return build("causal", config_class("causal", "deepseek_v3"))


def attention(model: Any) -> Any:
    return model.model.layers[0].self_attn


def expanded(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens go through the projection that expands latents, call by call."""
    seen: list[int] = []
    linear = torch.nn.functional.linear
    weight = attention(model).kv_b_proj.weight

    def watched(x: torch.Tensor, w: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if w is weight:
            seen.append(x.shape[-2])
        return linear(x, w, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    return seen
