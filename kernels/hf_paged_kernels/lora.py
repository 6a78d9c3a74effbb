"""Low-rank products of many adapters in one batch: y += scale * (x A^T) B^T, the adapter chosen by token."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .launching import launch
from .tiles import precision

FEW = 512
"""Up to so many tokens an adapter's tile has 16 of them, as few as a matrix product takes; beyond, 64."""
PART = 512
"""Columns of x that one program of a shrink reads at least."""
PARTS = (8, 2, 1)
"""In how many parts a shrink reads x: few numbers, since each makes another kernel of an expand."""
PROGRAMS = 1056
"""Programs that a GPU has at work at once; with more of them each does more."""
WIDE = 128
"""Columns of an output that an expand computes at a time."""
MOST_OUTPUTS = 3
"""Layers with one input that one expand can write to."""
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
        self.tiles = min(tokens, tokens // self.tile + slots)
        self._memory = torch.empty(self.tiles * (1 + self.tile), dtype=torch.int32, device=device)
        self.slot = self._memory[: self.tiles]
        """The adapter of each tile; -1 for a tile that this step does not use."""
        self.token = self._memory[self.tiles :]
        """[tiles * tile]: the tokens of each tile, -1 where there are fewer."""

    def update(self, index: torch.Tensor) -> None:
        """Sort the tokens by `index` [tokens], int32 on the device: each one's slot, -1 for the base."""
        if index.shape != (self.tokens,) or index.dtype != torch.int32:
            raise ValueError(
                f"Invalid index: expected [{self.tokens}] of torch.int32, got {list(index.shape)} of "
                f"{index.dtype}"
            )
        self._memory.fill_(-1)
        launch(
            _sort, (triton.cdiv(self.tokens, 32),),
            self.slot, self.token, index, self.tokens, self.slots,
            TILE=self.tile, BY_PLACE=self.tiles == self.tokens, MINE=32,
            CHUNK=64 if self.tokens <= 64 else 1024, num_warps=4,
        )  # fmt: skip


class LoraWeights:
    """Where the adapters of some layers lie, and of which rank they are: tables that kernels read.

    A captured step reads the tables again in every replay. So adapters may come, go and move, one in place of
    another, while a graph stays: `put` and `clear` change entries on the host, `upload` brings them to the
    device, and no tensor of the graph is another. No weight is copied.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scaled: bool = False,
    ) -> None:
        """rank: the largest of all, rounded up to 16. scaled: whether any has a factor or shift."""
        if rank < 16 or rank % 16:
            raise ValueError(f"Invalid rank: expected the largest of all, rounded up to 16, got {rank}")
        self.layers = layers
        self.slots = slots
        self.rank = rank
        self.dtype = dtype
        self.where = torch.zeros(4, layers, slots, dtype=torch.int64, device=device)
        """The addresses of A and of B, and of float32 factors and shifts of the layer's outputs (0: none)."""
        self.scaled = scaled
        """True if there may be factors and shifts: an expand without is one that does not read them."""
        self.ranks = torch.zeros(layers, slots, dtype=torch.int32, device=device)
        """0 for a slot whose adapter leaves the layer as it is."""
        self.scales = torch.zeros(layers, slots, dtype=torch.float32, device=device)
        self._host = [torch.zeros_like(each, device="cpu") for each in (self.where, self.ranks, self.scales)]

    def put(
        self,
        layer: int,
        slot: int,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
        factor: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
    ) -> None:
        """Let a slot of a layer be a [r, n] and b [outputs, r], factor and shift float32 [outputs], which the
        caller keeps where they are: y becomes factor * (y + scale * x a^T b^T) + shift.
        """
        rank = a.shape[0]
        if not self.scaled and (factor is not None or shift is not None):
            raise ValueError("Invalid factor or shift: these tables were made without (scaled=False)")
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
        where[2, layer, slot] = 0 if factor is None else factor.data_ptr()
        where[3, layer, slot] = 0 if shift is None else shift.data_ptr()
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
        """Tensors for the kernels, on the device."""
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
    """True if kernels can read a weight of an adapter of this rank where it is."""
    return weight.is_contiguous() and rank % 8 == 0 and weight.data_ptr() % 16 == 0


def lora_shrink(x: torch.Tensor, weights: LoraWeights, plan: AdapterPlan) -> torch.Tensor:
    """x A^T of each token's adapter for all layers: fp32 [parts, tokens, layers, rank], whose parts add
    up to it.

    x [tokens, n] with the last stride 1. Tokens of the base are not written, nor is what lies beyond the rank
    of an adapter.
    """
    n = x.shape[1]
    if x.shape[0] != plan.tokens or x.stride(1) != 1 or plan.slots != weights.slots:
        raise ValueError(
            f"Invalid shape of x: expected [{plan.tokens}, n] for {plan.slots} slots, got {list(x.shape)} "
            f"and weights of {weights.slots}"
        )
    rank = weights.rank
    wide = min(64, rank & -rank)
    many = weights.layers * (rank // wide)
    most = max(1, min(n // PART, 4 * PROGRAMS // (plan.tiles * many)))
    parts = next(count for count in PARTS if count <= most)
    out = torch.empty(parts, plan.tokens, weights.layers, rank, dtype=torch.float32, device=x.device)
    block = 128 if weights.dtype.itemsize == 2 else 64
    launch(
        _shrink, (plan.tiles, parts, many),
        out, x, weights.where[0], weights.ranks, plan.slot, plan.token,
        plan.tokens, weights.slots, x.stride(0), n, triton.cdiv(triton.cdiv(n, parts), block) * block,
        weights.layers * rank, rank // wide,
        WIDE=wide, TILE=plan.tile, BLOCK=block, TYPE=TYPES[weights.dtype],
        PRECISION=_precision(x.dtype, weights.dtype), UP=x.device.type == "cpu", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def lora_gather(ids: torch.Tensor, weights: LoraWeights, plan: AdapterPlan, n: int) -> torch.Tensor:
    """The columns A[:, id] of each token's adapter, as a shrink of one layer: fp32 [1, tokens, 1, rank].

    ids [tokens] int64, below n: A is [rank, n]. Tokens of the base are not written.
    """
    if ids.shape != (plan.tokens,) or weights.layers != 1:
        raise ValueError(
            f"Invalid ids: expected [{plan.tokens}] for one layer, got {list(ids.shape)} for {weights.layers}"
        )
    out = torch.empty(1, plan.tokens, 1, weights.rank, dtype=torch.float32, device=ids.device)
    launch(
        _gather, (plan.tiles, weights.rank // 16),
        out, ids, weights.where[0], weights.ranks, plan.slot, plan.token, n, weights.rank,
        TILE=plan.tile, TYPE=TYPES[weights.dtype], num_warps=4,
    )  # fmt: skip
    return out


def lora_expand(
    outs: Sequence[torch.Tensor], shrunk: torch.Tensor, weights: LoraWeights, plan: AdapterPlan,
    *, first: int = 0,
) -> None:  # fmt: skip
    """outs[i] += scale * h B^T of each token's adapter for layer `first` + i, in place, then times its factor
    and plus its shift; tokens of the base stay as they are.

    outs: up to 3 of [tokens, n] with the last stride 1, the base's answers of layers in a row; shrunk as
    `lora_shrink` answers it for all of `weights`.
    """
    parts, tokens = shrunk.shape[:2]
    if not 0 < len(outs) <= MOST_OUTPUTS:
        raise ValueError(f"Invalid outs: expected 1 to {MOST_OUTPUTS}, got {len(outs)}")
    for out in outs:
        if out.shape[0] != plan.tokens or out.stride(1) != 1 or tokens != plan.tokens:
            raise ValueError(
                f"Invalid shape of outs: expected [{plan.tokens}, n] for shrunk {list(shrunk.shape)}, got "
                f"{list(out.shape)}"
            )
    rank = weights.rank
    widths = [out.shape[1] for out in outs]
    blocks = sum(triton.cdiv(width, WIDE) for width in widths)
    loop = triton.cdiv(plan.tiles * blocks, PROGRAMS)
    grid = plan.tiles, sum(triton.cdiv(width, WIDE * loop) for width in widths)
    more = [outs[min(i, len(outs) - 1)] for i in range(MOST_OUTPUTS)]
    launch(
        _expand, grid,
        *more, shrunk, *[each[first:] for each in weights.where[1:]], weights.ranks[first:],
        weights.scales[first:], plan.slot, plan.token, tokens, weights.slots,
        *[out.stride(0) for out in more],
        *[out.shape[1] for out in more], first * rank, weights.layers * rank, loop,
        SCALED=weights.scaled, LAYERS=len(outs), PARTS=parts, RANK=rank, TILE=plan.tile, WIDE=WIDE,
        BLOCK=min(64, rank & -rank), TYPE=TYPES[weights.dtype], STAGES=2 if plan.tile == 16 else 3,
        PRECISION=_precision(outs[0].dtype, weights.dtype), UP=outs[0].device.type == "cpu", num_warps=4,
    )  # fmt: skip


def _precision(x: torch.dtype, weights: torch.dtype) -> str:
    """How products are taken: all of fp32's digits where the model has them."""
    return precision(torch.float32 if x == weights == torch.float32 else torch.bfloat16)


@triton.jit(do_not_specialize=["tokens", "slots"], do_not_specialize_on_alignment=["SLOT", "TOKEN", "INDEX"])
def _sort(
    SLOT, TOKEN, INDEX, tokens, slots,
    TILE: tl.constexpr, BY_PLACE: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """SLOT, TOKEN: tiles of TILE tokens of one slot, in the order of the slots and of the tokens.

    A program places MINE tokens by counting how many go before each. The tile that begins at place p with a
    token of slot s has number p, or p // TILE + s: no two have the same.
    """
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    slot = tl.load(INDEX + mine, mask=mine < tokens, other=-1)
    key = tl.where((slot < 0) | (slot >= slots), slots, slot)
    place = tl.zeros([MINE], tl.int32)
    before = tl.zeros([MINE], tl.int32)
    for start in range(0, tokens, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(INDEX + other, mask=other < tokens, other=-1)
        theirs = tl.where((theirs < 0) | (theirs >= slots), slots, theirs)
        theirs = tl.where(other < tokens, theirs, slots + 1)
        earlier = (theirs[None, :] == key[:, None]) & (other[None, :] < mine[:, None])
        place += tl.sum((theirs[None, :] < key[:, None]).to(tl.int32), 1)
        before += tl.sum(earlier.to(tl.int32), 1)
    lane = before % TILE
    first = place + before - lane
    number = first if BY_PLACE else first // TILE + key
    there = (mine < tokens) & (key < slots)
    tl.store(TOKEN + number * TILE + lane, mine, mask=there)
    tl.store(SLOT + number, key, mask=there & (lane == 0))


@triton.jit(
    do_not_specialize=["tokens", "slots", "stacked", "wides"],
    do_not_specialize_on_alignment=["A", "RANKS", "SLOT", "TOKEN"],
)
def _shrink(
    OUT, X, A, RANKS, SLOT, TOKEN, tokens, slots, x_token, n, columns, stacked, wides,
    WIDE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """OUT[part, token, layer] = X[token, `columns` of the part] A^T, for WIDE rows of a layer's A and the
    tokens of a tile. A token's row of a part has `stacked` numbers, a layer's `wides` times WIDE of them.

    A, RANKS [layers, slots]: the address of A [rank, n] of TYPE. Rows beyond its rank are 0 or not written.
    """
    tile = tl.program_id(0)
    slot = tl.load(SLOT + tile)
    token = tl.load(TOKEN + tile * TILE + tl.arange(0, TILE))  # at once: each load in a row costs a step time
    if slot < 0:
        return
    layer = tl.program_id(2) // wides
    first_row = tl.program_id(2) % wides * WIDE
    rank = tl.load(RANKS + layer * slots + slot)
    weights = tl.load(A + layer * slots + slot).to(tl.pointer_type(TYPE))
    if first_row >= rank:
        return  # an expand reads no more of this than the adapter's own rank
    row = first_row + tl.arange(0, WIDE)
    weights = tl.multiple_of(weights, 16) + row * n
    there = token >= 0
    token = tl.where(there, token, 0).to(tl.int64)
    begin = tl.program_id(1) * columns
    end = min(begin + columns, n)
    sums = tl.zeros([TILE, WIDE], tl.float32)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(
            X + token[:, None] * x_token + column[None, :],
            mask=there[:, None] & (column[None, :] < n),
            other=0.0,
        )
        a = tl.load(
            weights[None, :] + column[:, None], mask=(column[:, None] < n) & (row[None, :] < rank), other=0.0
        )
        if UP:
            x = x.to(tl.float32)
            a = a.to(tl.float32)
        else:
            x = x.to(a.dtype)
        sums = tl.dot(x, a, sums, input_precision=PRECISION)
    stacked = tl.multiple_of(stacked, 16)
    to = OUT + (tl.program_id(1).to(tl.int64) * tokens + token[:, None]) * stacked
    tl.store(to + layer * wides * WIDE + row[None, :], sums, mask=there[:, None])


@triton.jit(do_not_specialize_on_alignment=["A", "RANKS", "SLOT", "TOKEN"])
def _gather(OUT, IDS, A, RANKS, SLOT, TOKEN, n, width, TILE: tl.constexpr, TYPE: tl.constexpr):
    """OUT[token] = A[16 of its rows, IDS[token]], A that of the tile's slot.

    A, RANKS [slots]: the address of A [rank, n] of TYPE.
    """
    tile = tl.program_id(0)
    slot = tl.load(SLOT + tile)
    token = tl.load(TOKEN + tile * TILE + tl.arange(0, TILE))
    if slot < 0:
        return
    there = token >= 0
    token = tl.where(there, token, 0).to(tl.int64)
    row = tl.program_id(1) * 16 + tl.arange(0, 16)
    inside = there[:, None] & (row[None, :] < tl.load(RANKS + slot))
    weights = tl.multiple_of(tl.load(A + slot).to(tl.pointer_type(TYPE)), 16)
    column = tl.load(IDS + token, mask=there, other=0)
    found = tl.load(weights + row[None, :].to(tl.int64) * n + column[:, None], mask=inside, other=0.0)
    tl.store(OUT + token[:, None] * width + row[None, :], found.to(tl.float32), mask=inside)


@triton.jit(
    do_not_specialize=["tokens", "slots", "offset", "stacked", "loop"],
    do_not_specialize_on_alignment=["B", "FACTORS", "SHIFTS", "RANKS", "SCALES", "SLOT", "TOKEN"],
)
def _expand(
    OUT0, OUT1, OUT2, SHRUNK, B, FACTORS, SHIFTS, RANKS, SCALES, SLOT, TOKEN, tokens, slots, stride0, stride1,
    stride2, n0, n1, n2, offset, stacked, loop,
    SCALED: tl.constexpr, LAYERS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """OUT[token] += SCALES[slot] * H[token] B^T for `loop` * WIDE columns of one of the layers, H the sum of
    the parts of SHRUNK. SCALED: then times a factor and plus a shift by column.

    B, FACTORS, SHIFTS, RANKS, SCALES [layers, slots]: the address of B [n, rank] of TYPE, and of factors and
    shifts.
    """
    tile = tl.program_id(0)
    slot = tl.load(SLOT + tile)
    token = tl.load(TOKEN + tile * TILE + tl.arange(0, TILE))
    if slot < 0:
        return
    part = tl.program_id(1)
    first = tl.cdiv(n0, WIDE * loop)
    second = first + tl.cdiv(n1, WIDE * loop)
    if LAYERS == 1 or part < first:
        _expand_layer(
            OUT0, SHRUNK, B, FACTORS, SHIFTS, RANKS, SCALES, slot, token, tokens, slots, stride0, n0, offset,
            stacked, loop, 0, part,
            SCALED, PARTS, RANK, TILE, WIDE, BLOCK, TYPE, PRECISION, UP, STAGES,
        )  # fmt: skip
    elif LAYERS == 2 or part < second:
        _expand_layer(
            OUT1, SHRUNK, B, FACTORS, SHIFTS, RANKS, SCALES, slot, token, tokens, slots, stride1, n1, offset,
            stacked, loop, 1, part - first,
            SCALED, PARTS, RANK, TILE, WIDE, BLOCK, TYPE, PRECISION, UP, STAGES,
        )  # fmt: skip
    else:
        _expand_layer(
            OUT2, SHRUNK, B, FACTORS, SHIFTS, RANKS, SCALES, slot, token, tokens, slots, stride2, n2, offset,
            stacked, loop, 2, part - second,
            SCALED, PARTS, RANK, TILE, WIDE, BLOCK, TYPE, PRECISION, UP, STAGES,
        )  # fmt: skip


@triton.jit
def _expand_layer(
    OUT, SHRUNK, B, FACTORS, SHIFTS, RANKS, SCALES, slot, token, tokens, slots, out_token, n, offset, stacked,
    loop, layer, part,
    SCALED: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for one layer."""
    ranks = tl.multiple_of(tl.load(RANKS + layer * slots + slot), 8)
    scale = tl.load(SCALES + layer * slots + slot)
    weights = tl.multiple_of(tl.load(B + layer * slots + slot).to(tl.pointer_type(TYPE)), 16)
    if SCALED:
        factors = tl.load(FACTORS + layer * slots + slot)
        shifts = tl.load(SHIFTS + layer * slots + slot)
    there = token >= 0
    token = tl.where(there, token, 0).to(tl.int64)
    stacked = tl.multiple_of(stacked, 16)
    shrunk = SHRUNK + token[:, None] * stacked + tl.multiple_of(offset, 16) + layer * RANK
    if RANK == BLOCK:
        # What a shrink has not written may be anything, and must not meet the zeros of b.
        first = tl.arange(0, BLOCK)
        h = _sum_parts(shrunk, 0, there, tokens, stacked, PARTS, TILE, BLOCK)
        h = tl.where(first[None, :] < ranks, h, 0.0)
    for i in tl.range(0, loop, num_stages=STAGES):
        column = (part * loop + i) * WIDE + tl.arange(0, WIDE)
        at = OUT + token[:, None] * out_token + column[None, :]
        inside = there[:, None] & (column[None, :] < n) & (ranks > 0)
        y = tl.load(at, mask=inside, other=0.0)  # under way while the product is computed
        if RANK == BLOCK:
            b = _load_b(weights, column, first, n, ranks, UP)
            sums = tl.dot(h.to(b.dtype), b, input_precision=PRECISION)
        else:
            sums = tl.zeros([TILE, WIDE], tl.float32)
            for start in range(0, ranks, BLOCK):
                rank = start + tl.arange(0, BLOCK)
                h = _sum_parts(shrunk, start, there, tokens, stacked, PARTS, TILE, BLOCK)
                h = tl.where(rank[None, :] < ranks, h, 0.0)
                b = _load_b(weights, column, rank, n, ranks, UP)
                sums = tl.dot(h.to(b.dtype), b, sums, input_precision=PRECISION)
        y = y.to(tl.float32) + scale * sums
        if SCALED:
            known = (column < n) & (ranks > 0)
            factor = factors.to(tl.pointer_type(tl.float32)) + column
            shift = shifts.to(tl.pointer_type(tl.float32)) + column
            y = y * tl.load(factor, mask=known & (factors != 0), other=1.0)[None, :]
            y = y + tl.load(shift, mask=known & (shifts != 0), other=0.0)[None, :]
        tl.store(at, y.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _load_b(weights, column, rank, n, ranks, UP: tl.constexpr):
    """[BLOCK, WIDE]: some rows of B^T, 0 beyond the adapter's own rank."""
    inside = (column[None, :] < n) & (rank[:, None] < ranks)
    b = tl.load(weights + column[None, :] * ranks + rank[:, None], mask=inside, other=0.0)
    return b.to(tl.float32) if UP else b


@triton.jit
def _sum_parts(
    shrunk, start, there, tokens, stacked,
    PARTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[TILE, BLOCK]: the sum of all parts of a shrink, from column `start` on."""
    h = tl.zeros([TILE, BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        at = shrunk + part * tokens.to(tl.int64) * stacked + start + tl.arange(0, BLOCK)[None, :]
        h += tl.load(at, mask=there[:, None], other=0.0)
    return h
