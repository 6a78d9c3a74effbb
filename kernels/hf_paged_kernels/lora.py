"""Low-rank products of many adapters in one batch: y += scale * (x A^T) B^T, the adapter chosen by token."""

from __future__ import annotations

import copy

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
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


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


class LoraWeights:
    """Where the adapters of some layers lie, and of which rank they are: tables that kernels read.

    A captured step reads the tables again in every replay. So adapters may come, go and move, one in place of
    another, while a graph stays: `put` and `clear` change entries on the host, `upload` brings them to the
    device, and no tensor of the graph is another. No weight is copied.
    """

    def __init__(
        self, layers: int, slots: int, rank: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """rank: the largest of all, rounded up to a multiple of 16."""
        if rank < 16 or rank % 16:
            raise ValueError(f"Invalid rank: expected the largest of all, rounded up to 16, got {rank}")
        self.layers = layers
        self.slots = slots
        self.rank = rank
        self.dtype = dtype
        self.where = torch.zeros(2, layers, slots, dtype=torch.int64, device=device)
        """The addresses of A and of B."""
        self.ranks = torch.zeros(layers, slots, dtype=torch.int32, device=device)
        """0 for a slot whose adapter leaves the layer as it is."""
        self.scales = torch.zeros(layers, slots, dtype=torch.float32, device=device)
        self._host = [torch.zeros_like(each, device="cpu") for each in (self.where, self.ranks, self.scales)]

    def put(self, layer: int, slot: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Let a slot of a layer be a [r, n] and b [outputs, r], which the caller keeps where they are."""
        rank = a.shape[0]
        if a.dtype != self.dtype or b.dtype != self.dtype or b.shape[1] != rank or rank > self.rank:
            raise ValueError(
                f"Invalid weights: expected [r, n] and [outputs, r] of {self.dtype} with r up to "
                f"{self.rank}, got {list(a.shape)} of {a.dtype} and {list(b.shape)} of {b.dtype}"
            )
        if not (fits(a, rank) and fits(b, rank)):
            raise ValueError(
                f"Invalid weights: expected them aligned, without gaps, and r a multiple of 8, got r={rank}"
            )
        where, ranks, scales = self._host
        where[0, layer, slot] = a.data_ptr()
        where[1, layer, slot] = b.data_ptr()
        ranks[layer, slot] = rank
        scales[layer, slot] = scale

    def clear(self, slot: int) -> None:
        """Let a slot leave every layer as it is."""
        self._host[1][:, slot] = 0

    def upload(self) -> None:
        """Bring what has changed to the device, for all launches after this."""
        for ours, host in zip((self.where, self.ranks, self.scales), self._host, strict=True):
            ours.copy_(host)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What kernels read, on the device."""
        return [self.where, self.ranks, self.scales]

    def part(self, first: int, layers: int) -> LoraWeights:
        """The tables of some layers in a row, which have one input: the same memory."""
        found = copy.copy(self)
        found.layers = layers
        found.where = self.where[:, first : first + layers]
        found.ranks = self.ranks[first : first + layers]
        found.scales = self.scales[first : first + layers]
        return found


def fits(weight: torch.Tensor, rank: int) -> bool:
    """Whether kernels can read a weight of an adapter of this rank where it is."""
    return weight.is_contiguous() and rank % 8 == 0 and weight.data_ptr() % 16 == 0


def lora_shrink(x: torch.Tensor, weights: LoraWeights, plan: AdapterPlan) -> torch.Tensor:
    """x A^T of each token's adapter for all layers: fp32 [parts, tokens, layers, rank], whose parts add
    up to it.

    x [tokens, n] with the last stride 1. Tokens of the base are not written.
    """
    n = x.shape[1]
    if x.shape[0] != plan.tokens or x.stride(1) != 1 or plan.slots != weights.slots:
        raise ValueError(
            f"Invalid shape of x: expected [{plan.tokens}, n] for {plan.slots} slots, got {list(x.shape)} "
            f"and weights of {weights.slots}"
        )
    parts = max(1, min(MOST_PARTS, n // PART)) if plan.tile == 16 else 1
    rank = weights.rank
    out = torch.empty(parts, plan.tokens, weights.layers, rank, dtype=torch.float32, device=x.device)
    wide = min(64, rank & -rank)
    block = 128 if weights.dtype.itemsize == 2 else 64
    launch(
        _shrink, (plan.tiles, parts, weights.layers * (rank // wide)),
        out, x, weights.where[0], weights.ranks, plan.order, plan.slot, plan.first, plan.count,
        plan.tokens, weights.slots, x.stride(0),
        N=n, LAYERS=weights.layers, RANK=rank, WIDE=wide, TILE=plan.tile, BLOCK=block,
        PART=triton.cdiv(triton.cdiv(n, parts), block) * block, TYPE=TYPES[weights.dtype],
        PRECISION=_precision(x.dtype, weights.dtype), UP=x.device.type == "cpu", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def lora_expand(
    out: torch.Tensor, shrunk: torch.Tensor, weights: LoraWeights, plan: AdapterPlan, *, layer: int = 0
) -> None:
    """out += scale * h B^T of each token's adapter, in place; tokens of the base stay as they are.

    out [tokens, n] with the last stride 1, the base's answer of one of the layers; shrunk as `lora_shrink`
    answers it.
    """
    parts, tokens = shrunk.shape[:2]
    if out.shape[0] != plan.tokens or out.stride(1) != 1 or tokens != plan.tokens:
        raise ValueError(
            f"Invalid shape of out: expected [{plan.tokens}, n] for shrunk {list(shrunk.shape)}, got "
            f"{list(out.shape)}"
        )
    rank = weights.rank
    n = out.shape[1]
    wide = 128
    launch(
        _expand, (plan.tiles, triton.cdiv(n, wide)),
        out, shrunk, weights.where[1, layer], weights.ranks[layer], weights.scales[layer],
        plan.order, plan.slot, plan.first, plan.count, tokens, out.stride(0), layer * rank,
        PARTS=parts, STACKED=weights.layers * rank, N=n, TILE=plan.tile, WIDE=wide,
        BLOCK=min(64, rank & -rank), TYPE=TYPES[weights.dtype],
        PRECISION=_precision(out.dtype, weights.dtype), UP=out.device.type == "cpu", num_warps=4,
    )  # fmt: skip


def _precision(x: torch.dtype, weights: torch.dtype) -> str:
    """How products are taken: all of fp32's digits where the model has them."""
    return precision(torch.float32 if x == weights == torch.float32 else torch.bfloat16)


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


@triton.jit(do_not_specialize=["tokens", "slots"])
def _shrink(
    OUT, X, A, RANKS, ORDER, SLOT, FIRST, COUNT, tokens, slots, x_token,
    N: tl.constexpr, LAYERS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """OUT[part, token, layer] = X[token, columns of the part] A^T, for WIDE rows of a layer's A and the
    tokens of a tile.

    A, RANKS [layers, slots]: the address of A [rank, N] of TYPE. Rows beyond its rank are 0 or not written.
    """
    tile = tl.program_id(0)
    slot = tl.load(SLOT + tile)
    if slot < 0:
        return
    layer = tl.program_id(2) // (RANK // WIDE)
    first_row = tl.program_id(2) % (RANK // WIDE) * WIDE
    rank = tl.load(RANKS + layer * slots + slot)
    if first_row >= rank:
        return  # an expand reads no more of this than the adapter's own rank
    row = first_row + tl.arange(0, WIDE)
    weights = tl.load(A + layer * slots + slot).to(tl.pointer_type(TYPE))
    weights = tl.multiple_of(weights, 16) + row * N
    lane = tl.arange(0, TILE)
    there = lane < tl.load(COUNT + tile)
    token = tl.load(ORDER + tl.load(FIRST + tile) + lane, mask=there, other=0).to(tl.int64)
    begin = tl.program_id(1) * PART
    end = min(begin + PART, N)
    sums = tl.zeros([TILE, WIDE], tl.float32)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(
            X + token[:, None] * x_token + column[None, :],
            mask=there[:, None] & (column[None, :] < N),
            other=0.0,
        )
        a = tl.load(
            weights[None, :] + column[:, None], mask=(column[:, None] < N) & (row[None, :] < rank), other=0.0
        )
        if UP:
            x = x.to(tl.float32)
            a = a.to(tl.float32)
        else:
            x = x.to(a.dtype)
        sums = tl.dot(x, a, sums, input_precision=PRECISION)
    to = OUT + (tl.program_id(1).to(tl.int64) * tokens + token[:, None]) * (LAYERS * RANK)
    tl.store(to + layer * RANK + row[None, :], sums, mask=there[:, None])


@triton.jit(do_not_specialize=["tokens", "offset"])
def _expand(
    OUT, SHRUNK, B, RANKS, SCALES, ORDER, SLOT, FIRST, COUNT, tokens, out_token, offset,
    PARTS: tl.constexpr, STACKED: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """OUT[token] += SCALES[slot] * H[token] B^T for WIDE columns, H the sum of the parts of SHRUNK.

    B, RANKS, SCALES [slots]: the address of B [N, rank] of TYPE.
    """
    tile = tl.program_id(0)
    slot = tl.load(SLOT + tile)
    if slot < 0:
        return
    ranks = tl.load(RANKS + slot)
    if ranks == 0:
        return
    ranks = tl.multiple_of(ranks, 8)
    lane = tl.arange(0, TILE)
    there = lane < tl.load(COUNT + tile)
    token = tl.load(ORDER + tl.load(FIRST + tile) + lane, mask=there, other=0).to(tl.int64)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    weights = tl.multiple_of(tl.load(B + slot).to(tl.pointer_type(TYPE)), 16) + column * ranks
    sums = tl.zeros([TILE, WIDE], tl.float32)
    for start in range(0, ranks, BLOCK):
        rank = start + tl.arange(0, BLOCK)
        h = tl.zeros([TILE, BLOCK], tl.float32)
        for part in range(PARTS):
            at = SHRUNK + (part * tokens + token[:, None]) * STACKED + offset + rank[None, :]
            h += tl.load(at, mask=there[:, None], other=0.0)
        inside = (column[None, :] < N) & (rank[:, None] < ranks)
        b = tl.load(weights[None, :] + rank[:, None], mask=inside, other=0.0)
        if UP:
            b = b.to(tl.float32)
        sums = tl.dot(h.to(b.dtype), b, sums, input_precision=PRECISION)
    at = OUT + token[:, None] * out_token + column[None, :]
    inside = there[:, None] & (column[None, :] < N)
    y = tl.load(at, mask=inside, other=0.0).to(tl.float32) + tl.load(SCALES + slot) * sums
    tl.store(at, y.to(OUT.dtype.element_ty), mask=inside)
