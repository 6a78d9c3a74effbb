"""How much memory a device has to give."""

import psutil  # type: ignore[import-untyped]  # comes with accelerate, without stubs
import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that an allocation on `device` could get now, the allocator's own reserve included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(psutil.virtual_memory().available)
