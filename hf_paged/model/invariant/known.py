"""The mode's knowledge of torch's functions and operations, by name."""

from __future__ import annotations

from typing import Any

import torch

from ...kv.ops import invariant_kernels

EXACT = frozenset(
    (
        "add", "amax", "amin", "any", "all", "argmax", "argmin", "bitwise_and", "bitwise_not",
        "bitwise_or", "bitwise_xor", "ceil", "clamp", "clamp_max", "clamp_min", "eq", "floor",
        "floor_divide", "frac", "ge", "gt", "hardtanh", "isfinite", "isin", "isinf", "isnan",
        "isneginf", "isposinf", "le", "leaky_relu", "logical_and", "logical_not",
        "logical_or", "logical_xor", "lt", "masked_fill",
        "nan_to_num", "fmin", "fmax", "fmod", "copysign", "aminmax", "max", "maximum", "min", "minimum",
        "mul", "ne", "neg", "relu", "remainder", "round", "sign", "sub",
        "threshold", "tril", "triu", "trunc", "where",
    )
)  # fmt: skip
"""Each number of the answer is rounded once, from numbers at its own place, or none is rounded at all."""
REAL = frozenset(("abs", "reciprocal", "rsqrt", "sgn", "sqrt", "square"))
"""The same of real numbers, in float32: a CPU rounds some `rsqrt` of halves once, others twice."""
MOVES = frozenset(
    (
        "_conj", "_conj_physical", "_local_scalar_dense", "_neg_view", "_reshape_alias", "_reshape_copy",
        "_to_copy", "_unsafe_view", "alias", "arange", "as_strided", "cat", "clone",
        "constant_pad_nd", "copy", "detach", "diagonal", "embedding", "empty", "empty_like",
        "empty_strided", "equal", "expand", "fill", "flip", "full", "full_like", "gather",
        "index", "index_copy", "index_fill", "index_select", "lift", "lift_fresh",
        "lift_fresh_copy", "masked_scatter", "masked_select",
        "movedim", "narrow", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
        "nonzero", "ones", "ones_like", "permute", "pin_memory", "repeat", "repeat_interleave", "roll",
        "resolve_conj", "resolve_neg",
        "scalar_tensor", "scatter", "select", "set", "slice", "slice_scatter", "sort", "split",
        "split_with_sizes", "squeeze", "stack", "t", "tile", "topk", "transpose", "unbind", "unfold",
        "unsqueeze", "view", "view_as_real", "view_as_complex", "complex", "real", "imag", "zero",
        "zeros", "zeros_like", "resize", "is_same_size", "record_stream",
    )
)  # fmt: skip
"""The numbers only change places."""
RANDOM = frozenset(
    (
        "bernoulli", "exponential", "multinomial", "normal", "rand", "rand_like", "randint", "randn",
        "randperm", "uniform",
    )
)  # fmt: skip
"""Draws, which are not promised."""
AFTER = frozenset(
    (
        "cumprod", "searchsorted", "bucketize", "bincount", "histc", "nll_loss_forward",
        "nll_loss2d_forward",
    )
)  # fmt: skip
"""Operations after the logits: sampling, losses; rows are summed one number after the other."""

SPELLINGS = frozenset(
    (
        "__getitem__", "bfloat16", "chunk", "contiguous", "flatten", "float", "half", "reshape",
        "reshape_as", "to", "type_as", "unflatten", "view_as",
    )
)  # fmt: skip
"""Functions that move numbers by operations of other names."""

FUNCTIONS = ("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf", "sigmoid", "silu")
"""Functions of one number."""
OPTIMIZERS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
"""How the names of operations begin that change weights."""


class NotInvariant(NotImplementedError):
    """An operation of the model may round by what else is in the batch: there is no invariant form of it."""


def kernels_for(x: torch.Tensor) -> Any:
    """The kernels for tensors like x."""
    if x.dtype == torch.float64 or x.is_complex():
        raise NotInvariant(f"batch_invariant() supports float32 and half precision, got {x.dtype}")
    if x.device.type not in ("cpu", "cuda"):
        raise NotInvariant(
            f"batch_invariant() supports CPUs and CUDA devices, got a tensor on {x.device}; leave it out"
        )
    return invariant_kernels(x.device.type)
