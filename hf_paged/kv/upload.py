"""Numbers copied between the host and a device without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def upload(numbers: Any, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """A tensor of `numbers` on `device`.

    The host does not wait; the allocator keeps the staging memory until it is read.
    """
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=pinned)


class Download:
    """Tensors of one device on their way to the host: all copies are launched, and `wait` waits for them
    together.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if tensors and tensors[0].is_cuda:
            self._tensors = [
                torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=True).copy_(
                    each, non_blocking=True
                )
                for each in tensors
            ]
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
