"""Chains of operations on numbers, sums along lines, and parts of lines put together otherwise, as one kernel
that is written for them.

Each operation is computed in fp32 and rounded to the type of its answer, as torch computes and rounds it.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import exact
from .launching import early, follow, launch

WIDEST = 16384
TILE = 1024
TYPES = {torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
SUMS = ("sum", "mean")
PARTS = ("cat", "slice", "interleave")
FUNCTIONS = {
    "copy": "{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "tl.div_rn({0}, {1})",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "square": "{0} * {0}",
    "reciprocal": "tl.div_rn(tl.where({0} == {0}, 1.0, {0}), {0})",
    "rsqrt": "tl.rsqrt({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "relu": "tl.where({0} < 0.0, 0.0, {0})",
    "at_least": "tl.where({0} < {1}, {1}, {0})",
    "at_most": "tl.where({0} > {1}, {1}, {0})",
    "clamp": "tl.where(tl.where({0} < {1}, {1}, {0}) > {2}, {2}, tl.where({0} < {1}, {1}, {0}))",
    "exp": "exact.exp({0}, EXACT)",
    "tanh": "exact.tanh({0}, EXACT)",
    "sigmoid": "exact.sigmoid({0}, EXACT)",
    "silu": "exact.silu({0}, EXACT)",
    "softplus": "exact.softplus({0}, EXACT)",
    "gelu": "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    "gelu_tanh": "exact.gelu_tanh({0}, EXACT)",
    "sum": "tl.sum(tl.where(real, {0}, 0.0), 1)[:, None]",
    "mean": "(tl.sum(tl.where(real, {0}, 0.0), 1) * FACTOR)[:, None]",
}
"""By name of an operation, its code: {0} and {1} are its operands."""


class Operation(NamedTuple):
    """An operation of a chain."""

    kind: str
    """One of FUNCTIONS, of which "sum" and "mean" go along lines, and what they answer counts for the whole
    line; or one of PARTS: "cat" of values and the columns where all but the first begin; "slice" of a value,
    with the first column, the one behind the last, and the step; "interleave" of two values column by column.
    """
    operands: tuple[int | float, ...]
    """An integer is a value's place among inputs and, behind them, operations; a float is a number."""
    dtype: torch.dtype
    """The type to which the answer is rounded."""


def chain(
    inputs: Sequence[torch.Tensor], operations: Sequence[Operation], outputs: Mapping[int, torch.Tensor]
) -> None:
    """Compute operations on inputs, and put some values, named by their places, into outputs.

    Inputs and outputs have one shape [..., n], any strides, and types of TYPES; with sums or parts n is at
    most 16384. With parts inputs may have another last size, or 1: a number that counts for the whole line.
    """
    tensors = [*outputs.values(), *inputs]
    shape = tensors[0].shape
    parts = any(each.kind in PARTS for each in operations)
    wrong = [
        x
        for i, x in enumerate(tensors)
        if x.dtype not in TYPES
        or (x.shape != shape and (not parts or i < len(outputs) or x.ndim == 0 or x.shape[:-1] != shape[:-1]))
    ]
    if wrong or not inputs:
        raise ValueError(
            f"Invalid shape or type of a tensor: expected {list(shape)} in one of "
            f"{', '.join(map(str, TYPES))}, got {[(list(x.shape), x.dtype) for x in wrong] or 'no input'}"
        )
    whole = parts or any(each.kind in SUMS for each in operations)
    if whole and (not shape or shape[-1] > WIDEST):
        raise ValueError(f"Invalid shape: sums and parts are of lines of 1 to {WIDEST}, got {list(shape)}")
    if not tensors[0].numel():
        return
    *dims, (n, *along) = _dims(tensors, whole)
    dims = dims or [[1] + [0] * len(tensors)]
    sizes = [size for size, *_ in dims]
    strides = tuple((*(each[1 + i] for each in dims), stride) for i, stride in enumerate(along))
    widths = tuple(x.shape[-1] for x in inputs) if parts else ()
    form = _Form(
        tuple(sizes[1:]), strides, len(inputs), tuple(operations), tuple(outputs), n if whole else 0, widths
    )
    count = prod(sizes)
    padded = triton.next_power_of_2(n)
    if not whole:  # of one line any number of tiles: it has one kernel, however long it is
        padded = TILE if count == 1 else min(padded, TILE)
    at_once = max(1, TILE // padded)
    launch(
        _kernel(form), (triton.cdiv(count, at_once), triton.cdiv(n, padded)), *tensors, count, n,
        AT_ONCE=at_once, PADDED=padded, EXACT=tensors[0].device.type != "cpu",
        num_warps=max(4, min(16, at_once * padded // 256)), enable_fp_fusion=False,
        **early(tensors[0].device),
    )  # fmt: skip


def _dims(tensors: Sequence[torch.Tensor], whole: bool) -> list[list[int]]:
    """The dimensions as few as they can be, outermost in the first tensor first: each its size and every
    tensor's stride. whole: the last is the tensors' own last.
    """
    first = tensors[0]
    order = [*range(first.ndim - whole)]
    dims: list[list[int]] = []
    for d in sorted((d for d in order if first.shape[d] != 1), key=lambda d: -first.stride(d)):
        size = first.shape[d]
        strides = [x.stride(d) for x in tensors]
        if dims and dims[-1][1:] == [size * stride for stride in strides]:
            dims[-1] = [dims[-1][0] * size, *strides]
        else:
            dims.append([size, *strides])
    if whole:
        return [*dims, [first.shape[-1], *(x.stride(-1) for x in tensors)]]
    return dims or [[1] + [0] * len(tensors)]


class _Form(NamedTuple):
    """All that a kernel's code depends on."""

    lines: tuple[int, ...]
    """The sizes of the dimensions of lines, but for the outermost."""
    strides: tuple[tuple[int, ...], ...]
    """Of every tensor, outputs first: one a dimension of lines, and that along a line."""
    inputs: int
    operations: tuple[Operation, ...]
    stored: tuple[int, ...]
    """The places of the values that outputs get."""
    width: int
    """The length of a line that is summed or put together; 0 if none is."""
    widths: tuple[int, ...]
    """That of every input's lines, if any is put together."""


_kernels: dict[_Form, Any] = {}
MOST = 1024
"""Kernels that are kept."""


def _kernel(form: _Form) -> Any:
    """The kernel of a form: one, whichever thread asks first."""
    if form not in _kernels and len(_kernels) >= MOST:
        _kernels.clear()
    return _kernels.get(form) or _kernels.setdefault(form, _made(form))


def _made(form: _Form) -> Any:
    """A kernel: its source is a file without a place on disk, in which Triton finds it."""
    source = "\n".join(_source(form)) + "\n"
    place = f"<hf_paged chain {sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[place] = len(source), None, source.splitlines(keepends=True), place
    names = {"__name__": __name__, "tl": tl, "exact": exact, "follow": follow}
    exec(compile(source, place, "exec"), names)
    if not isinstance(exact.exp, triton.JITFunction):  # the interpreter's, like all others
        return type(exact.exp)(names["chain"])
    return triton.jit(do_not_specialize=["count", "n"])(names["chain"])


def _source(form: _Form) -> list[str]:
    outs = len(form.stored)
    tensors = ", ".join([*(f"OUT{i}" for i in range(outs)), *(f"IN{i}" for i in range(form.inputs))])
    text = [
        "follow(EARLY)",
        "line = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)",
        "column = (tl.program_id(1) * PADDED + tl.arange(0, PADDED))[None, :]",
        "there = (line < count)[:, None]",
        "real = there & (column < n)",
    ]
    if form.width:
        text.append(f"FACTOR: tl.constexpr = {1.0 / form.width!r}")
    for d, size in reversed([*enumerate(form.lines, 1)]):
        text += [f"at{d} = (line % {size}).to(tl.int64)[:, None]", f"line = line // {size}"]
    text.append("at0 = line.to(tl.int64)[:, None]")
    values = _Values(form, text)
    for i, value in enumerate(form.stored):
        name = values.at(value, COLUMN)
        place = _address(form.strides[i], COLUMN)
        text.append(f"tl.store(OUT{i} + {place}, {name}.to(OUT{i}.dtype.element_ty), mask=real)")
    sizes = "count, n, AT_ONCE: tl.constexpr, PADDED: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr"
    return [f"def chain({tensors}, {sizes}):", *(f"    {each}" for each in text)]


COLUMN = "column"


def _address(strides: Sequence[int], column: str) -> str:
    indices = [*(f"at{d}" for d in range(len(strides) - 1)), column]
    return " + ".join(f"{index} * {stride}" for index, stride in zip(indices, strides, strict=True))


class _Values:
    """The code of values, each at the columns where it is asked for."""

    def __init__(self, form: _Form, text: list[str]) -> None:
        self.form = form
        self.text = text
        self._names: dict[tuple[int, str], str] = {}

    def at(self, value: int, column: str) -> str:
        """The name of a value at columns, given as code."""
        if value >= self.form.inputs and self._operation(value).kind in SUMS:
            column = COLUMN  # a number for the whole line
        key = value, column
        if key not in self._names:
            code = self._loaded(*key) if value < self.form.inputs else self._computed(*key)
            self._names[key] = f"v{len(self._names)}"
            self.text.append(f"{self._names[key]} = {code}")
        return self._names[key]

    def _operation(self, value: int) -> Operation:
        return self.form.operations[value - self.form.inputs]

    def _loaded(self, value: int, column: str) -> str:
        strides = self.form.strides[len(self.form.stored) + value]
        width = self.form.widths[value] if self.form.widths else self.form.width
        inside = "real"
        if width == 1 < self.form.width:
            inside, strides = "there", (*strides[:-1], 0)
        elif column != COLUMN or width != self.form.width:
            inside = f"there & ({column} >= 0) & ({column} < {width})"
        place = _address(strides, column)
        return f"tl.load(IN{value} + {place}, mask={inside}, other=0.0).to(tl.float32)"

    def _computed(self, value: int, column: str) -> str:
        kind, operands, dtype = self._operation(value)
        if kind == "cat":
            return self._joined(operands, column)
        if kind == "slice":
            of, begin, _, step = map(int, operands)
            return self.at(of, f"(({column}) * {step} + {begin})")
        if kind == "interleave":
            first, second = (self.at(int(of), f"(({column}) // 2)") for of in operands)
            return f"tl.where(({column}) % 2 == 0, {first}, {second})"
        named = [self.at(x, column) if isinstance(x, int) else _number(x) for x in operands]
        code = FUNCTIONS[kind].format(*named)
        return code if dtype == torch.float32 else f"({code}).to({TYPES[dtype]}).to(tl.float32)"

    def _joined(self, operands: Sequence[int | float], column: str) -> str:
        first, *others = [x for x in operands if isinstance(x, int)]
        code = self.at(first, column)
        for of, begin in zip(others, [int(x) for x in operands if isinstance(x, float)], strict=True):
            code = f"tl.where(({column}) < {begin}, {code}, {self.at(of, f'(({column}) - {begin})')})"
        return code


def _number(x: float) -> str:
    return f'float("{x}")' if x != x or x in (float("inf"), float("-inf")) else repr(x)
