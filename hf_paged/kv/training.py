"""How much memory training takes between two rollouts, and whether pools fit beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from .budget import free_bytes

AT_FIRST = 1 / 8
"""The share of the free memory that pools may keep while nothing is known of training's need."""
SLACK = 1.05
"""How much more than before training may take, as batches differ."""


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes of tensors on a device; None where nothing counts them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak_bytes(device: torch.device) -> int:
    """The most bytes of tensors that a device has had."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


class TrainingMemory:
    """Memory that training was seen to take on each device beyond what was there when it began."""

    def __init__(self) -> None:
        self.runs = False
        """True if a forward has trained since the last one that did not."""
        self._begun: dict[torch.device, tuple[int, int]] = {}
        """Bytes allocated when it began, and the most that had been."""
        self._need: dict[torch.device, int] = {}

    def begin(self, devices: Iterable[torch.device]) -> None:
        """The first forward that trains after a rollout."""
        self.runs = True
        for device in devices:
            now = allocated_bytes(device)
            if now is not None:
                self._begun[device] = now, peak_bytes(device)

    def end(self) -> None:
        """Training is over for now: note what it took, or a bound where the peak was reached before it."""
        self.runs = False
        for device, (before, most) in self._begun.items():
            peak = peak_bytes(device)
            if peak > most:
                self._need[device] = max(self._need.get(device, 0), peak - before)
            else:
                self._need.setdefault(device, peak - before)
        self._begun.clear()

    def why_no_room(self, pools: Mapping[torch.device, int]) -> str | None:
        """Why pools of so many bytes per device may be in the way of training that begins; None if they are
        not.
        """
        for device, held in pools.items():
            free = free_bytes(device)
            need = self._need.get(device)
            if need is None and held > AT_FIRST * free:
                return f"{held:,} bytes on {device} are more than an eighth of the {free:,} that are free"
            if need is not None and SLACK * need > free:
                return (
                    f"training took up to {need:,} bytes on {device}, and {free:,} are free beside {held:,}"
                )
        return None
