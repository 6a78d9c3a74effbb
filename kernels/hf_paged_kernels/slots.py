"""Recurrent states by slot, as the kernels of one token take them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def check_slots(
    states: torch.Tensor, shape: tuple[int, ...], source: torch.Tensor, target: torch.Tensor, rows: int
) -> None:
    """Raise unless states are [slots, *shape], each without gaps, and source and target are int64 [rows]."""
    if states.shape[1:] != shape or not states[0].is_contiguous():
        raise ValueError(
            f"Invalid shape of states: expected [slots, {', '.join(map(str, shape))}], each without gaps, "
            f"got {list(states.shape)}, {states.stride()}"
        )
    for name, slots in (("source", source), ("target", target)):
        if slots.shape != (rows,) or slots.dtype != torch.int64 or not slots.is_contiguous():
            raise ValueError(
                f"Invalid shape of {name}: expected [{rows}] of torch.int64 without gaps, got "
                f"{list(slots.shape)} of {slots.dtype}"
            )


def check_last(**tensors: torch.Tensor) -> None:
    """Raise unless the last stride of each is 1."""
    for name, x in tensors.items():
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"Invalid strides of {name}: the last must be 1, got {x.stride()}")


@triton.jit
def read_state(STATES, SOURCE, row, stride, inside, real):
    """The part `inside` of the state that `row` reads, where `real`, in fp32: zeros if it reads none."""
    slot = tl.load(SOURCE + row)
    return tl.load(STATES + slot * stride + inside, mask=real & (slot >= 0), other=0.0).to(tl.float32)


@triton.jit
def write_state(STATES, TARGET, row, stride, inside, real, state):
    """Write the part `inside` of the state that `row` writes, where `real`, if it writes one."""
    slot = tl.load(TARGET + row)
    tl.store(STATES + slot * stride + inside, state.to(STATES.dtype.element_ty), mask=real & (slot >= 0))
