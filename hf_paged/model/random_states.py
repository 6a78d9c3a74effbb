"""The states of torch's generators: whether a computation has drawn numbers, and as if it had not."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that a computation on the device may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def has_drawn(before: Sequence[torch.Tensor], device: torch.device) -> bool:
    """True if the generators have moved since their states were read."""
    return not all(map(torch.equal, before, random_states(device)))


def take_back_draws(before: Sequence[torch.Tensor], device: torch.device) -> None:
    """Put the generators back to where they were."""
    torch.set_rng_state(before[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(before[1], device)
