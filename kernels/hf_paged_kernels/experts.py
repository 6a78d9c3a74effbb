"""Products of a mixture of experts: every row by the weights of the experts that its router chose.

The host never learns how many rows an expert has. `route` orders the pairs of row and expert on the device,
the experts that have rows first, and a launch is as large as there could be of them.
"""

# ruff: noqa: SIM108 - a branch on a constant must stay a plain if: Triton compiles the other side away
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import exact
from .launching import launch
from .swiglu import ACTIVATIONS

PAIRS = 2048
"""The most pairs that a program of `route` looks at together."""
FIELDS = 3
"""Of an expert's record: which it is, the place of its first pair, and how many it has."""


class Routes(NamedTuple):
    """The pairs of row and expert, ordered by expert."""

    order: torch.Tensor
    """[pairs] int32: pair number `row * top + choice`, those of one expert side by side, by their numbers."""
    records: torch.Tensor
    """[experts, FIELDS] int32: the experts that have pairs, then the others with none."""
    top: int
    """Experts of each row."""


class _Tile(NamedTuple):
    """How a launch is cut; no bit depends on it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FLOATS = _Tile(16, 32, 32, 4, 2)
HALVES = [
    (8, _Tile(16, 32, 128, 4, 4), _Tile(16, 64, 128, 4, 3)),
    (24, _Tile(32, 64, 64, 4, 4), _Tile(32, 64, 128, 4, 3)),
    (96, _Tile(64, 128, 64, 8, 4), _Tile(64, 128, 64, 4, 4)),
    (2**62, _Tile(128, 128, 64, 8, 3), _Tile(128, 128, 64, 8, 3)),
]
"""Mean pairs of an expert that has any, up to, and the tiles with gates and without. The first two are
measured on an H200.
"""
MOST_TILES = 4
"""Programs that share the rows of one expert at most, where a mean expert has several tiles of them."""


def route(chosen: torch.Tensor, experts: int) -> Routes:
    """The pairs of chosen [rows, top], numbers of experts. A number that is no expert's makes no pair."""
    if chosen.ndim != 2:
        raise ValueError(f"Invalid shape of chosen: expected [rows, top], got {list(chosen.shape)}")
    chosen = chosen.contiguous()
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    records = torch.empty(experts, FIELDS, dtype=torch.int32, device=chosen.device)
    block = min(PAIRS, max(128, triton.next_power_of_2(pairs)))
    launch(
        _route, (experts,), chosen, order, records, pairs,
        EXPERTS=experts, BINS=triton.next_power_of_2(experts + 1), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return Routes(order, records, chosen.shape[1])


def expert_product(
    x: torch.Tensor,
    w: torch.Tensor,
    routes: Routes,
    bias: torch.Tensor | None = None,
    *,
    by_pair: bool = False,
    activation: str | None = None,
) -> torch.Tensor:
    """x w[expert] + bias[expert] of every pair, each step rounded: [pairs, columns], by the pairs' numbers.
    Pairs without an expert are not written.

    x [rows, depth], or with by_pair [pairs, depth]; w [experts, depth, columns] with any strides; bias
    [experts, columns]. activation: w has gates in the first half of its columns and what they gate in the
    second, and the answer is activation(gate) * up [pairs, columns / 2].
    """
    if w.ndim != 3 or x.ndim != 2 or w.shape[1] != x.shape[1] or w.dtype != x.dtype:
        raise ValueError(
            f"Invalid shape of w: expected [experts, {x.shape[-1]}, columns] of {x.dtype}, got "
            f"{list(w.shape)} of {w.dtype}"
        )
    if activation is not None and (activation not in ACTIVATIONS or w.shape[2] % 2):
        raise ValueError(
            f"Invalid activation {activation!r} of {w.shape[2]} columns: expected one of "
            f"{', '.join(ACTIVATIONS)} and an even number"
        )
    if bias is not None and (bias.shape != (w.shape[0], w.shape[2]) or bias.stride(1) != 1):
        raise ValueError(
            f"Invalid shape of bias: expected [{w.shape[0]}, {w.shape[2]}] with the last stride 1, got "
            f"{list(bias.shape)}"
        )
    x = x if x.stride(1) == 1 else x.contiguous()
    pairs = routes.order.shape[0]
    columns = w.shape[2] if activation is None else w.shape[2] // 2
    out = torch.empty(pairs, columns, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    most = min(pairs, w.shape[0])
    mean = pairs / most
    floats = x.dtype == torch.float32
    gated, plain = (FLOATS, FLOATS) if floats else next(tiles for bound, *tiles in HALVES if mean <= bound)
    tile = plain if activation is None else gated
    shared = max(1, min(MOST_TILES, round(mean / tile.rows)))
    launch(
        _product, (triton.cdiv(columns, tile.columns), most, shared),
        x, w, x if bias is None else bias, routes.order, routes.records, out, x.shape[1], columns,
        x.stride(0), w.stride(0), w.stride(1), w.stride(2), 0 if bias is None else bias.stride(0),
        TOP=1 if by_pair else routes.top, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        WHOLE=x.shape[1] % tile.depth == 0, HAS_BIAS=bias is not None, GATED=activation is not None,
        GELU=activation == "gelu_tanh", EXACT=x.device.type != "cpu", PRECISION="ieee" if floats else "tf32",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def expert_sum(y: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """The sums over y [pairs, columns] of each row's experts by weights [rows, top]: [rows, columns].

    Products are rounded to what torch multiplies in, sums once. A pair whose number in chosen [rows, top] is
    no expert's adds nothing, whatever is in its y.
    """
    rows, top = weights.shape
    columns = y.shape[1]
    if y.shape[0] != rows * top or not y.is_contiguous():
        raise ValueError(f"Invalid shape of y: expected [{rows * top}, columns], got {list(y.shape)}")
    out = torch.empty(rows, columns, dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    block = min(1024, triton.next_power_of_2(columns))
    launch(
        _sum, (rows, triton.cdiv(columns, block)), y, weights.contiguous(), chosen.contiguous(), out, columns,
        TOP=top, EXPERTS=experts, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["pairs"])
def _route(
    CHOSEN, ORDER, RECORDS, pairs,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The pairs of one expert in ORDER, and its record.

    CHOSEN [pairs]; ORDER [pairs]; RECORDS [EXPERTS, 3]. Every program counts all pairs, so none waits for
    another.
    """
    own = tl.program_id(0)
    expert = tl.arange(0, BINS)
    place = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    for at in range(0, pairs, BLOCK):
        chosen = tl.load(CHOSEN + at + place, mask=at + place < pairs, other=EXPERTS).to(tl.int32)
        chosen = tl.where((chosen >= 0) & (chosen < EXPERTS), chosen, EXPERTS)
        counts += tl.histogram(chosen, BINS)
    counts = tl.where(expert < EXPERTS, counts, 0)
    begin = tl.sum(tl.where(expert < own, counts, 0))
    count = tl.sum(tl.where(expert == own, counts, 0))
    some = (counts > 0).to(tl.int32)
    before = tl.sum(tl.where(expert < own, some, 0))
    slot = tl.where(count > 0, before, tl.sum(some) + own - before)
    tl.store(RECORDS + slot * 3, own)
    tl.store(RECORDS + slot * 3 + 1, begin)
    tl.store(RECORDS + slot * 3 + 2, count)
    if count > 0:
        for at in range(0, pairs, BLOCK):
            chosen = tl.load(CHOSEN + at + place, mask=at + place < pairs, other=EXPERTS).to(tl.int32)
            mine = (chosen == own).to(tl.int32)
            to = begin + tl.cumsum(mine, 0) - 1
            tl.store(ORDER + to, at + place, mask=mine > 0)
            begin += tl.sum(mine)


@triton.jit
def _product(
    X, W, BIAS, ORDER, RECORDS, OUT, depth, columns, x_row, w_expert, w_depth, w_column, bias_expert,
    TOP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of OUT for the pairs of one expert, ROWS at once.

    X [rows, depth], of which a pair reads number pair // TOP; W [experts, depth, columns], twice as many if
    GATED; BIAS [experts, as many]; ORDER [pairs]; RECORDS [experts, 3]; OUT [pairs, columns].
    """
    record = RECORDS + tl.program_id(1) * 3
    expert = tl.load(record).to(tl.int64)
    begin = tl.load(record + 1)
    count = tl.load(record + 2)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    weights = (
        W
        + expert * w_expert
        + k[:, None].to(tl.int64) * w_depth
        + (column % columns)[None, :].to(tl.int64) * w_column
    )
    for first in range(tl.program_id(2) * ROWS, count, ROWS * tl.num_programs(2)):
        place = first + tl.arange(0, ROWS)
        there = place < count
        pair = tl.load(ORDER + begin + place, mask=there, other=0)
        x = X + (pair // TOP).to(tl.int64)[:, None] * x_row + k[None, :]
        w = weights
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        above = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(0, depth, DEPTH):
            if WHOLE:
                a = tl.load(x, mask=there[:, None], other=0.0)
                b = tl.load(w)
            else:
                a = tl.load(x, mask=there[:, None] & (at + k < depth)[None, :], other=0.0)
                b = tl.load(w, mask=(at + k < depth)[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            if GATED:
                if WHOLE:
                    b = tl.load(w + columns.to(tl.int64) * w_column)
                else:
                    b = tl.load(
                        w + columns.to(tl.int64) * w_column, mask=(at + k < depth)[:, None], other=0.0
                    )
                above = tl.dot(a, b, above, input_precision=PRECISION)
            x += DEPTH
            w += DEPTH * w_depth
        y = total.to(OUT.dtype.element_ty)
        up = above.to(OUT.dtype.element_ty)
        if HAS_BIAS:
            own = BIAS + expert * bias_expert + column
            y = _biased(y, own, column < columns)
            if GATED:
                up = _biased(up, own + columns, column < columns)
        if GATED:
            gate = y.to(tl.float32)
            if GELU:
                gate = exact.gelu_tanh(gate, EXACT)
            else:
                gate = exact.silu(gate, EXACT)
            y = (gate.to(y.dtype).to(tl.float32) * up.to(tl.float32)).to(y.dtype)
        to = OUT + pair.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(to, y, mask=there[:, None] & (column < columns)[None, :])


@triton.jit
def _biased(y, BIAS, there):
    """y [rows, columns] + BIAS [columns], rounded as y is."""
    bias = tl.load(BIAS, mask=there, other=0.0)
    return (y.to(tl.float32) + bias.to(tl.float32)[None, :]).to(y.dtype)


@triton.jit
def _sum(Y, WEIGHTS, CHOSEN, OUT, columns, TOP: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[row] = the sum of round(Y[row, choice] * WEIGHTS[row, choice]); Y [rows, TOP, columns]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP):
        chosen = tl.load(CHOSEN + row * TOP + choice)
        valid = (chosen >= 0) & (chosen < EXPERTS)
        weight = tl.load(WEIGHTS + row * TOP + choice)
        y = tl.load(Y + (row * TOP + choice) * columns + column, mask=(column < columns) & valid, other=0.0)
        part = y.to(tl.float32) * weight.to(tl.float32)
        if WEIGHTS.dtype.element_ty == Y.dtype.element_ty:
            part = part.to(Y.dtype.element_ty).to(tl.float32)
        total += tl.where(valid, part, 0.0)
    tl.store(OUT + row * columns + column, total.to(OUT.dtype.element_ty), mask=column < columns)
