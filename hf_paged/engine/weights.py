"""Whether a model is still the one that the cached blocks were computed with (C24)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

SAMPLES = 4
"""Elements of each parameter that are read: a change that moves neither version nor address changes what is there."""
ADAPTER_STATE = ("active_adapters", "merged_adapters", "disable_adapters", "_disable_adapters", "scaling")


class Weights:
    """What was last seen of a model's weights."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._look()

    def touched(self) -> bool:
        """Whether a parameter was written or replaced in the way that torch counts. Cheap, for every step."""
        return self._names != _names(self._holders)

    def changed(self) -> bool:
        """Whether anything is different since the last look, content and adapters included; this is a look."""
        before = self._names, self._content
        self._look()
        return before != (self._names, self._content)

    def _look(self) -> None:
        # Modules' own dicts: a parameter that is replaced is seen, and nothing is walked in every step.
        self._holders = [module._parameters for module in self._model.modules() if module._parameters]
        self._names = _names(self._holders)
        self._content = _content(self._model)


def _names(holders: list[dict[str, nn.Parameter | None]]) -> tuple[Any, ...]:
    return tuple(
        (id(parameter), parameter.data_ptr(), parameter._version)
        for holder in holders
        for parameter in holder.values()
        if parameter is not None
    )


def _content(model: nn.Module) -> tuple[Hashable, ...]:
    """A few elements of every parameter, and what peft's layers do with theirs."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and parameter.device.type != "meta":
                by_device.setdefault(parameter.device, []).append(_some(parameter))
        samples = [torch.cat(parts).cpu().numpy().tobytes() for parts in by_device.values()]
    return (*samples, *_adapters(model))


def _some(parameter: torch.Tensor) -> torch.Tensor:
    """A few elements, from end to end."""
    count = parameter.numel()
    samples = min(SAMPLES, count)
    # In whole numbers: those of a large parameter are no float32.
    places = torch.arange(samples, device=parameter.device) * (count - 1) // max(1, samples - 1)
    data = parameter.detach()
    flat = data.view(-1) if data.is_contiguous() else data.reshape(-1)
    return flat[places].double()


def _adapters(model: nn.Module) -> Iterator[Hashable]:
    for module in model.modules():
        for name in ADAPTER_STATE:
            if name in module.__dict__ or (name == "active_adapters" and hasattr(type(module), name)):
                yield name, repr(getattr(module, name))
