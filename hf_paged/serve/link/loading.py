"""Models by name: what transformers loads, as the class it was trained with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...model.loading import DEMO, Checkpoint, first_device, require_path
from . import ranks

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that from_pretrained takes beside a device."""


@dataclass(frozen=True)
class Source:
    """Where a model and its tokenizer come from.

    dtype: "auto" takes the checkpoint's. device: without it the first CUDA device, or the CPU. device_map:
    instead, as from_pretrained takes it. tensor_parallel_size: the ranks that compute it together, of which
    this process is one.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.tensor_parallel_size > 1 and (self.device or self.device_map):
            raise ValueError("--tensor-parallel-size places the model; leave out --device and --device-map")
        require_path(self.model)
        dtype = getattr(torch, self.dtype, None)
        if self.dtype != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"--dtype {self.dtype} is not a dtype of weights; give auto, float32, bfloat16 or float16"
            )
        if self.revision is not None and (self.model in DEMO or Path(self.model).exists()):
            raise ValueError(
                f"--revision {self.revision}: {self.model} is not a checkpoint on the Hub; leave the flag out"
            )

    @property
    def name(self) -> str:
        """The model's name for clients unless the operator chooses another."""
        return "demo" if self.model in DEMO else self.model

    @property
    def checkpoint(self) -> Checkpoint:
        """Its files."""
        files = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        return Checkpoint.of(self.model, files)

    def load(self, quiet: bool = False) -> Any:
        """The model, ready to generate; of ranks this one's part. quiet: without a bar of its weights."""
        place = _divided() if self.tensor_parallel_size > 1 else {"device_map": self._place()}
        with ranks.meeting():
            return self.checkpoint.load(quiet, dtype=self.dtype, **place)

    def _place(self) -> str:
        """The device or the device map, once this machine is known to have it."""
        if self.device_map in MAPS:
            return self.device_map
        flag = "--device-map" if self.device_map else "--device"
        place = self.device_map or self.device or first_device()
        try:
            torch.empty(0, dtype=torch.uint8, device=place)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            others = f" or {', '.join(MAPS)}" if self.device_map else ""
            raise ValueError(
                f"{flag} {place} is not a device of this machine ({reason}); it has {_devices()}{others}"
            ) from error
        return place

    def load_processor(self) -> Any:
        """The processor of a model that takes images, else its tokenizer."""
        return self.checkpoint.load_processor(self.tokenizer)

    def load_tokenizer(self) -> Any:
        """The tokenizer."""
        return self.checkpoint.load_tokenizer(self.tokenizer)

    def outline(self) -> Any:
        """The model without weights: its modules on the meta device."""
        return self.checkpoint.outline(None if self.dtype == "auto" else getattr(torch, self.dtype))


def _divided() -> dict[str, Any]:
    """The keywords with which from_pretrained gives each rank its part."""
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    except (ImportError, TypeError):  # older releases have the plan as a keyword
        return {"tp_plan": "auto"}


def _devices() -> str:
    """The devices of this machine, for an error."""
    return ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
