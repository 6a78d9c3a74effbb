"""A forward that is replaced for a while."""

from __future__ import annotations

import torch
from torch import nn

from hf_paged.model.patches import ReplacedForward


def ours(x: torch.Tensor) -> torch.Tensor:
    return x


def users(x: torch.Tensor) -> torch.Tensor:
    return -x


def test_restoring_twice_is_once() -> None:
    """Also without a replacement, and whether the module or its class has the forward."""
    layer = nn.Linear(2, 2)
    for own in (None, users):
        if own is not None:
            layer.forward = own
        replaced = ReplacedForward(layer, layer.__dict__.get("forward"), ours)
        replaced.restore()
        replaced.replace()
        assert layer.forward is ours
        for _ in range(2):
            replaced.restore()
            assert layer.__dict__.get("forward") is own


def test_what_wraps_ours_stays() -> None:
    layer = nn.Linear(2, 2)
    replaced = ReplacedForward(layer, layer.__dict__.get("forward"), ours)
    replaced.replace()
    layer.forward = users
    replaced.restore()
    assert layer.forward is users
