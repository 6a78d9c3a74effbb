"""How a kernel is launched, or compiled without being launched."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.runtime import driver


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants), whose first argument is a tensor; nothing is computed if that is
    one without data ("meta").

    Then the kernel is compiled for the current CUDA device, in the specialisation that tensors with data of
    these shapes would meet.
    """
    if arguments[0].is_meta:
        _compile(kernel, arguments, constants)
    else:
        kernel[grid](*arguments, **constants)


def launches_early(device: torch.device) -> bool:
    """True if a kernel can be launched while the one before it runs, and wait for it in the middle: on Hopper
    and later GPUs. "meta" stands for the current one.
    """
    if device.type not in ("cuda", "meta") or not torch.cuda.is_available() or not hasattr(cuda, "gdc_wait"):
        return False
    return _is_hopper(device.index if device.type == "cuda" else None)


@cache
def _is_hopper(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel has EARLY, and reads nothing that another kernel writes before it has
    waited: where it can, it is launched while the one before it runs.
    """
    return {"EARLY": True, "launch_pdl": True} if launches_early(device) else {"EARLY": False}


@triton.jit
def follow(EARLY: tl.constexpr):
    """Let the next kernel be launched, and wait for the one before."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


def _compile(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Put the binary into Triton's memory, and the C code that launches it into Triton's cache on disk.

    Nothing is loaded on a device: the first launch does that, in its own thread.
    """
    if not isinstance(kernel, triton.JITFunction):
        return  # the interpreter's, which needs nothing
    made = kernel.warmup(*arguments, grid=(1,), **constants)
    if getattr(made, "module", made) is None:  # not launched yet
        driver.active.launcher_cls(made.src, made.metadata)


def find_driver() -> None:
    """Have Triton's driver, which a C compiler makes once on a machine."""
    driver.active.get_current_target()


def know_triton() -> None:
    """Have the digest of Triton itself, which every cached kernel is found by; that takes a moment, once in a
    process.
    """
    digest = getattr(triton.runtime.cache, "triton_key", None)
    if (
        digest is not None
    ):  # elsewhere in other versions, which then takes that moment when the first kernel is compiled
        digest()


def know_kernels() -> None:
    """Have the digests of these kernels' code, by which Triton finds them in its cache on disk.

    Threads that compile kernels with a function in common compute other digests from run to run: Triton asks
    which global values that function uses while another thread is about to find out.
    """
    for name, module in sorted(sys.modules.items()):
        if name.startswith(__package__ + "."):
            for each in vars(module).values():
                if isinstance(each, triton.JITFunction):
                    _ = each.cache_key
