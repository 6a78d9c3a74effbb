"""The gated activation of a feed-forward layer, rounded as torch rounds its two steps."""

# ruff: noqa: SIM108 - a branch on a constant must stay a plain if: Triton compiles the other side away
from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import exact
from .launching import early, follow, launch
from .norm import Lines

TILE = 1024
ACTIVATIONS = ("silu", "gelu_tanh")


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, *, activation: str = "silu", invariant: bool = False
) -> torch.Tensor:
    """activation(gate).to(dtype) * up, the activation in fp32: x / (1 + exp(-x)), or torch's gelu with
    approximate="tanh".

    gate and up [..., n] with the last stride 1: two tensors, or the two halves of one. The answer is [..., n]
    without gaps. invariant: with the bits of `mapped` and a product.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"Invalid activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if gate.ndim == 0 or gate.stride(-1) != 1:
        raise ValueError(
            f"Invalid shape of gate: expected [..., n] with the last stride 1, got {list(gate.shape)}, "
            f"{gate.stride()}"
        )
    if up.shape != gate.shape or up.dtype != gate.dtype or up.stride(-1) != 1:
        raise ValueError(
            f"Invalid shape of up: expected {list(gate.shape)} of {gate.dtype}, got {list(up.shape)} of "
            f"{up.dtype}"
        )
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    found = Lines.of(out, gate, up)
    if found is None:
        gate = gate.contiguous()
        up = up.contiguous()
        found = Lines.of(out, gate, up)
    n = gate.shape[-1]
    if found.count * n == 0:
        return out
    launch(
        _swiglu, (found.count, triton.cdiv(n, TILE)),
        out, gate, up, found.inner, *found.strides,
        N=n, TILE=TILE, GELU=activation == "gelu_tanh", EXACT=gate.device.type != "cpu", num_warps=4,
        enable_fp_fusion=not invariant, **early(out.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["inner"])
def _swiglu(
    OUT, GATE, UP, inner, out_outer, out_inner, gate_outer, gate_inner, up_outer, up_inner,
    N: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr, EXACT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """OUT = round(round(activation(GATE)) * UP), all [outer, inner, N]; a program takes TILE columns of one
    line.
    """
    follow(EARLY)
    far = (tl.program_id(0) // inner).to(tl.int64)
    near = (tl.program_id(0) % inner).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(GATE + far * gate_outer + near * gate_inner + column, mask=column < N, other=0.0)
    up = tl.load(UP + far * up_outer + near * up_inner + column, mask=column < N, other=0.0)
    x = gate.to(tl.float32)
    if GELU:
        y = exact.gelu_tanh(x, EXACT)
    else:
        y = exact.silu(x, EXACT)
    y = y.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(OUT + far * out_outer + near * out_inner + column, y.to(OUT.dtype.element_ty), mask=column < N)
