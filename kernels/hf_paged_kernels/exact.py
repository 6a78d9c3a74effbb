"""Parts shared by kernels whose answers no batch changes: sums without an order, functions of one number."""

# ruff: noqa: SIM108 - a branch on a constant must stay a plain if: Triton compiles the other side away
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

_WEIGHTS = tl.constexpr(float(2**23))


@triton.jit
def fixed_sum(x, LOG2_WIDTH: tl.constexpr):
    """The sums of x [rows, 2^LOG2_WIDTH], fp32, in fixed point: exact, so that no order or place of the
    numbers changes a bit. Less than 2^-40 of the largest number is cut off.
    """
    plain = tl.sum(x, 1)
    top = tl.max(tl.abs(x), 1)
    shift = fixed_shift(top, LOG2_WIDTH)
    total = from_fixed(tl.sum(to_fixed(x, shift), 1), shift)
    return tl.where((top < float("inf")) & (plain == plain), total, plain)


@triton.jit
def fixed_shift(top, LOG2_WIDTH: tl.constexpr):
    """The powers of two that make numbers up to `top` integers, 2^LOG2_WIDTH of which fit in 64 bits."""
    BITS: tl.constexpr = min(48, 60 - LOG2_WIDTH)
    return BITS + 126 - (top.to(tl.int32, bitcast=True) >> 23)


@triton.jit
def to_fixed(x, shift):
    """x [rows, n] times 2^shift [rows], without its fraction."""
    half = shift >> 1
    return (x * _power(half)[:, None] * _power(shift - half)[:, None]).to(tl.int64)


@triton.jit
def from_fixed(total, shift):
    """total / 2^shift, both [rows]."""
    half = shift >> 1
    return total.to(tl.float32) * _power(-half) * _power(half - shift)


@triton.jit
def _power(n):
    """2^n."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def weight_sum(p, INVARIANT: tl.constexpr):
    """The sums of weights p [rows, up to 128] between 0 and 1; INVARIANT is in fixed point, whatever the
    layout.
    """
    if INVARIANT:
        total = tl.sum((p * _WEIGHTS + 0.5).to(tl.int32), 1).to(tl.float32) * (1.0 / _WEIGHTS)
    else:
        total = tl.sum(p, 1)
    return total


@triton.jit
def exp(x, EXACT: tl.constexpr):
    """e^x: EXACT is CUDA's own, as torch has it, which the interpreter lacks."""
    if EXACT:
        y = libdevice.exp(x)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def log(x, EXACT: tl.constexpr):
    """The natural logarithm, likewise."""
    if EXACT:
        y = libdevice.log(x)
    else:
        y = tl.log(x)
    return y


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """tanh(x), likewise."""
    if EXACT:
        y = libdevice.tanh(x)
    else:
        y = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    return y


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    """1 / (1 + e^-x)."""
    return tl.div_rn(tl.where(x == x, 1.0, x), 1.0 + exp(-x, EXACT))


@triton.jit
def silu(x, EXACT: tl.constexpr):
    """x / (1 + e^-x)."""
    return tl.div_rn(x, 1.0 + exp(-x, EXACT))


@triton.jit
def softplus(x, EXACT: tl.constexpr):
    """log(1 + e^x), and x above 20, as torch has it."""
    if EXACT:
        y = libdevice.log1p(libdevice.exp(x))
    else:
        y = tl.log(1.0 + tl.exp(x))
    return tl.where(x > 20.0, x, y)


@triton.jit
def gelu_tanh(x, EXACT: tl.constexpr):
    """Torch's gelu with approximate="tanh"."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x)), EXACT))
