"""Streams beside a device's current one, on which captures run."""

from __future__ import annotations

from functools import cache

import torch


@cache
def side_stream(device: torch.device, use: str) -> torch.cuda.Stream:
    """The stream of a device for a use: always the same, for torch keeps memory for every one."""
    return torch.cuda.Stream(device)
