"""Numbers on their way from the host to a device, without anybody waiting."""

from __future__ import annotations

from typing import Any

import torch


def upload(numbers: Any, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """A tensor of `numbers` on `device`. The host goes on at once; the allocator keeps the staging memory until it is read."""
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)
