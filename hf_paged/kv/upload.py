"""Numbers copied to a device without waiting."""

from __future__ import annotations

from typing import Any

import torch


def upload(numbers: Any, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """A tensor of `numbers` on `device`.

    The host does not wait; the allocator keeps the staging memory until it is read.
    """
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=pinned)
