"""How much memory a device has to give."""

from typing import NamedTuple

import psutil  # type: ignore[import-untyped]  # comes with accelerate, without stubs
import torch

from ..blocks import OutOfBlocks

BYTES_OF_BOOKS = 20
"""Least bytes of host memory that the books of a pool take for a block."""


class Room(NamedTuple):
    """A device with memory for keys and values: its type, and the bytes that are free there."""

    type: str
    free: int


def free_bytes(device: torch.device) -> int:
    """Bytes that an allocation on `device` could get now, the allocator's own reserve included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(psutil.virtual_memory().available)


def require_room_for_books(blocks: int, option: str = "num_blocks") -> int:
    """The number of blocks that an option asks for, if the host has memory to keep books of so many; else
    asking for them would be the process's end.
    """
    free = free_bytes(torch.device("cpu"))
    if blocks * BYTES_OF_BOOKS > free:
        raise OutOfBlocks(
            f"the bookkeeping of {blocks} blocks does not fit into the host's memory ({free} bytes are "
            f"free); lower {option}"
        )
    return blocks
