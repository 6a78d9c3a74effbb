"""The parts of an installation: versions, devices, and the readers of pages on them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from typing import NamedTuple

import torch

import hf_paged

from ..kv import Layout
from ..kv.ops import why_no_kernels, why_not_built

AVAILABLE = "available"
PACKAGES = ("torch", "transformers", "accelerate", "triton", "peft")


class Facts(NamedTuple):
    """The facts of an installation.

    versions: of hf_paged, Python and the related packages; None for one that is not installed.
    devices: every CUDA device, or the CPU.
    kernels: what reads pages, by its name in `kernels=`: "available", or why it is not.
    """

    versions: dict[str, str | None]
    devices: tuple[str, ...]
    kernels: dict[str, str]

    def lines(self) -> list[str]:
        """The facts as text, one a line."""
        rows = [(name, version or "not installed") for name, version in self.versions.items()]
        rows += [("device", device) for device in self.devices]
        rows += [(f"kernels={name!r}", state) for name, state in self.kernels.items()]
        width = max(len(name) for name, _ in rows)
        return [f"{name:{width}}  {value}" for name, value in rows]


def facts() -> Facts:
    """The parts that are installed and can run here. Nothing is built."""
    versions: dict[str, str | None] = {"hf_paged": hf_paged.__version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in PACKAGES}
    why_not = {"triton": _why_no_triton(), "native": why_not_built(), "torch": None}
    return Facts(versions, _devices(), {name: reason or AVAILABLE for name, reason in why_not.items()})


def _why_no_triton() -> str | None:
    if not torch.cuda.is_available():
        return "the kernels need a CUDA device, and there is none"
    return why_no_kernels(Layout(torch.device("cuda"), torch.float16, 1, 64, 64))


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # installed under another name, as ROCm's triton is
        return str(getattr(importlib.import_module(package), "__version__", "of unknown version"))


def _devices() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        registers = torch.backends.cpu.get_cpu_capability()
        cpu = f"cpu, {platform.machine()}, {registers}, threads: {torch.get_num_threads()}"
        return (cpu,)
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    made_for = f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}"
    return tuple(
        f"cuda:{i}, {each.name}, {each.total_memory / 2**30:.0f} GiB, capability {each.major}.{each.minor}, "
        f"{made_for}"
        for i, each in enumerate(found)
    )
