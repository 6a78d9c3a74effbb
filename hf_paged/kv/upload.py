"""Numbers copied to a device without waiting."""

from __future__ import annotations

from array import array
from typing import Any

import torch


def upload(numbers: Any, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """A tensor of `numbers` on `device`.

    The host does not wait; the allocator keeps the staging memory until it is read.
    """
    if dtype == torch.int32 and type(numbers) is list and numbers and type(numbers[0]) is int:
        host = torch.frombuffer(array("i", numbers), dtype=dtype)  # in a third of the time
    else:
        host = torch.tensor(numbers, dtype=dtype, device="cpu")
    if device.type == "cpu":
        return host
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)  # `pin_memory=True` above refuses NumPy's arrays
