"""Low-rank products of many adapters in one batch: y += scale * (x A^T) B^T, the adapter chosen by token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch
from .tiles import precision

FEW = 512
"""Up to so many tokens an adapter's tile has 16 of them, as few as a matrix product takes; beyond, 64."""
PART = 512
"""Columns of x that one program of a shrink reads where tokens are few: more programs read at once."""
MOST_PARTS = 16


class AdapterPlan:
    """Which tokens share an adapter: `update` sorts them on the device once a step, and every layer reads it.

    A tile holds tokens of one adapter only. The grid of a launch covers every number of tiles that any mix of
    adapters can need, and all lengths come from device memory: a step that was captured with one mix, or with
    none, is right for every other.
    """

    def __init__(self, tokens: int, slots: int, device: torch.device | str) -> None:
        if tokens < 1 or slots < 1:
            raise ValueError(f"Invalid plan: expected 1 token and 1 slot or more, got {tokens} and {slots}")
        self.tokens = tokens
        self.slots = slots
        self.tile = 16 if tokens <= FEW else 64
        self.tiles = tokens // self.tile + slots
        ints = {"dtype": torch.int32, "device": device}
        self.order = torch.zeros(tokens, **ints)
        """Tokens sorted by their adapter, those of the base last."""
        self.slot = torch.full((self.tiles,), -1, **ints)
        """The adapter of each tile; -1 for a tile that this step does not use."""
        self.first = torch.zeros(self.tiles, **ints)
        """Where each tile's tokens begin in `order`."""
        self.count = torch.zeros(self.tiles, **ints)

    def update(self, index: torch.Tensor) -> None:
        """Sort the tokens by `index` [tokens], int32 on the device: each one's slot, -1 for the base."""
        if index.shape != (self.tokens,) or index.dtype != torch.int32:
            raise ValueError(
                f"Invalid index: expected [{self.tokens}] of torch.int32, got {list(index.shape)} of "
                f"{index.dtype}"
            )
        self.slot.fill_(-1)
        launch(
            _sort, (triton.cdiv(self.tokens, 32),),
            self.order, self.slot, self.first, self.count, index, self.tokens, self.slots,
            TILE=self.tile, MINE=32, CHUNK=min(1024, max(32, triton.next_power_of_2(self.tokens))),
            num_warps=4,
        )  # fmt: skip


def lora_shrink(x: torch.Tensor, a: torch.Tensor, plan: AdapterPlan) -> torch.Tensor:
    """x A^T of each token's adapter, in parts that add up to it: fp32 [parts, tokens, rank].

    x [tokens, n] with the last stride 1; a [slots, rank, n], contiguous: the rank is a multiple of 16, padded
    with zeros, and may stack the ranks of several layers with one input. Tokens of the base are not written.
    """
    slots, rank, n = a.shape
    if x.shape != (plan.tokens, n) or x.stride(1) != 1 or slots != plan.slots or x.dtype != a.dtype:
        raise ValueError(
            f"Invalid shape of x or a: expected [{plan.tokens}, n] and [{plan.slots}, rank, n] of one dtype, "
            f"got {list(x.shape)} of {x.dtype} and {list(a.shape)} of {a.dtype}"
        )
    if rank % 16 or not a.is_contiguous():
        raise ValueError(
            f"Invalid rank of a: expected contiguous rows, a multiple of 16 of them, got {list(a.shape)}"
        )
    parts = max(1, min(MOST_PARTS, n // PART)) if plan.tile == 16 else 1
    out = torch.empty(parts, plan.tokens, rank, dtype=torch.float32, device=x.device)
    wide = min(64, rank & -rank)
    block = 128 if x.dtype.itemsize == 2 else 64
    launch(
        _shrink, (plan.tiles, parts, rank // wide),
        out, x, a, plan.order, plan.slot, plan.first, plan.count, plan.tokens, x.stride(0),
        N=n, RANK=rank, WIDE=wide, TILE=plan.tile, BLOCK=block,
        PART=triton.cdiv(triton.cdiv(n, parts), block) * block,
        PRECISION=precision(x.dtype), UP=x.device.type == "cpu", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def lora_expand(
    out: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    plan: AdapterPlan,
    *,
    offset: int = 0,
) -> None:
    """out += scale * h B^T of each token's adapter, in place; tokens of the base stay as they are.

    out [tokens, n] with the last stride 1; shrunk as `lora_shrink` answers it, of which h are the columns
    from `offset` on; b [slots, n, rank], contiguous; scale [slots], fp32.
    """
    slots, n, rank = b.shape
    parts, tokens, stacked = shrunk.shape
    if out.shape != (plan.tokens, n) or out.stride(1) != 1 or out.dtype != b.dtype or slots != plan.slots:
        raise ValueError(
            f"Invalid shape of out or b: expected [{plan.tokens}, n] and [{plan.slots}, n, rank] of one "
            f"dtype, got {list(out.shape)} of {out.dtype} and {list(b.shape)} of {b.dtype}"
        )
    if tokens != plan.tokens or offset + rank > stacked or rank % 16 or not b.is_contiguous():
        raise ValueError(
            f"Invalid shape of shrunk: expected [parts, {plan.tokens}, {offset} + {rank} or more], got "
            f"{list(shrunk.shape)}"
        )
    wide = 128
    launch(
        _expand, (plan.tiles, triton.cdiv(n, wide)),
        out, shrunk, b, scale, plan.order, plan.slot, plan.first, plan.count, tokens, out.stride(0), offset,
        PARTS=parts, STACKED=stacked, N=n, RANK=rank, TILE=plan.tile, WIDE=wide, BLOCK=min(64, rank & -rank),
        PRECISION=precision(b.dtype), UP=out.device.type == "cpu", num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "slots"])
def _sort(
    ORDER, SLOT, FIRST, COUNT, INDEX, tokens, slots,
    TILE: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """ORDER: the tokens by their slots, stable; and the tiles of TILE tokens of one slot.

    A program places MINE tokens by counting how many go before each. The tile that begins at place p with a
    token of slot s has number p // TILE + s: no two have the same, and none is as large as
    tokens // TILE + slots.
    """
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    slot = tl.load(INDEX + mine, mask=mine < tokens, other=-1)
    key = tl.where((slot < 0) | (slot >= slots), slots, slot)
    place = tl.zeros([MINE], tl.int32)
    before = tl.zeros([MINE], tl.int32)
    alike = tl.zeros([MINE], tl.int32)
    for start in range(0, tokens, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(INDEX + other, mask=other < tokens, other=-1)
        theirs = tl.where((theirs < 0) | (theirs >= slots), slots, theirs)
        theirs = tl.where(other < tokens, theirs, slots + 1)
        same = theirs[None, :] == key[:, None]
        earlier = same & (other[None, :] < mine[:, None])
        place += tl.sum((theirs[None, :] < key[:, None]).to(tl.int32), 1)
        before += tl.sum(earlier.to(tl.int32), 1)
        alike += tl.sum(same.to(tl.int32), 1)
    place += before
    tl.store(ORDER + place, mine, mask=mine < tokens)
    begins = (mine < tokens) & (key < slots) & (before % TILE == 0)
    number = place // TILE + key
    tl.store(SLOT + number, key, mask=begins)
    tl.store(FIRST + number, place, mask=begins)
    tl.store(COUNT + number, tl.minimum(alike - before, TILE), mask=begins)


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    OUT, X, A, ORDER, SLOT, FIRST, COUNT, tokens, x_token,
    N: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """OUT[part, token] = X[token, columns of the part] A[slot]^T, for WIDE rows of A and a tile's tokens."""
    tile = tl.program_id(0)
    slot = tl.load(SLOT + tile)
    if slot < 0:
        return
    lane = tl.arange(0, TILE)
    there = lane < tl.load(COUNT + tile)
    token = tl.load(ORDER + tl.load(FIRST + tile) + lane, mask=there, other=0).to(tl.int64)
    row = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    weights = A + (slot.to(tl.int64) * RANK + row) * N
    begin = tl.program_id(1) * PART
    sums = tl.zeros([TILE, WIDE], tl.float32)
    for start in range(begin, min(begin + PART, N), BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(
            X + token[:, None] * x_token + column[None, :],
            mask=there[:, None] & (column[None, :] < N),
            other=0.0,
        )
        a = tl.load(weights[None, :] + column[:, None], mask=column[:, None] < N, other=0.0)
        if UP:
            x = x.to(tl.float32)
            a = a.to(tl.float32)
        sums = tl.dot(x, a, sums, input_precision=PRECISION)
    to = OUT + (tl.program_id(1).to(tl.int64) * tokens + token[:, None]) * RANK + row[None, :]
    tl.store(to, sums, mask=there[:, None])


@triton.jit(do_not_specialize=["tokens", "offset"])
def _expand(
    OUT, SHRUNK, B, SCALE, ORDER, SLOT, FIRST, COUNT, tokens, out_token, offset,
    PARTS: tl.constexpr, STACKED: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """OUT[token] += SCALE[slot] * H[token] B[slot]^T for WIDE columns, H the sum of the parts of SHRUNK."""
    tile = tl.program_id(0)
    slot = tl.load(SLOT + tile)
    if slot < 0:
        return
    lane = tl.arange(0, TILE)
    there = lane < tl.load(COUNT + tile)
    token = tl.load(ORDER + tl.load(FIRST + tile) + lane, mask=there, other=0).to(tl.int64)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    weights = B + (slot.to(tl.int64) * N + column) * RANK
    sums = tl.zeros([TILE, WIDE], tl.float32)
    for start in range(0, RANK, BLOCK):
        rank = start + tl.arange(0, BLOCK)
        h = tl.zeros([TILE, BLOCK], tl.float32)
        for part in range(PARTS):
            at = SHRUNK + (part * tokens + token[:, None]) * STACKED + offset + rank[None, :]
            h += tl.load(at, mask=there[:, None], other=0.0)
        b = tl.load(weights[None, :] + rank[:, None], mask=column[None, :] < N, other=0.0)
        if UP:
            b = b.to(tl.float32)
        sums = tl.dot(h.to(b.dtype), b, sums, input_precision=PRECISION)
    at = OUT + token[:, None] * out_token + column[None, :]
    inside = there[:, None] & (column[None, :] < N)
    y = tl.load(at, mask=inside, other=0.0).to(tl.float32) + tl.load(SCALE + slot) * sums
    tl.store(at, y.to(OUT.dtype.element_ty), mask=inside)
