"""Rows of a weight by slot: tokens of a slot read its rows in the place of a module's own, in an embedding
and in a head. All rows (a whole weight) or some of them (trained tokens).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch
from .lora import PROGRAMS, TYPES, AdapterPlan, _precision

COLUMNS = 1024
"""Columns of a row that one program copies."""
ROWS = 128
"""Rows of a weight that a product takes at a time."""
IDS = 256
"""Ids that a lookup compares at once."""


class SlotRows:
    """Where the rows of some modules lie by slot: tables that kernels read, as `LoraWeights` are."""

    def __init__(self, modules: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.modules = modules
        self.slots = slots
        self.dtype = dtype
        self.where = torch.zeros(modules, 3, slots, dtype=torch.int64, device=device)
        """The addresses of rows, of their int64 ids (0: row i is the one of id i) and of float32 biases (0:
        none).
        """
        self.counts = torch.zeros(modules, slots, dtype=torch.int32, device=device)
        """Numbers of rows; 0 for a slot whose adapter leaves the module as it is."""
        self.scales = torch.zeros(modules, slots, dtype=torch.float32, device=device)
        self._host = [torch.zeros_like(each, device="cpu") for each in self.tensors]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors for the kernels, on the device."""
        return [self.where, self.counts, self.scales]

    def put(
        self,
        module: int,
        slot: int,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """Let a slot of a module have rows [count, n], of all ids or of `ids` [count] int64, and a bias
        [count] float32. The caller keeps them where they are. scale: a factor of an embedding's rows.
        """
        if rows.dtype != self.dtype or not rows.is_contiguous() or rows.data_ptr() % 16:
            raise ValueError(
                f"Invalid rows: expected {self.dtype}, aligned and without gaps, got {rows.dtype} of "
                f"{list(rows.shape)}"
            )
        where, counts, scales = self._host
        for place, each in enumerate((rows, ids, bias)):
            where[module, place, slot] = 0 if each is None else each.data_ptr()
        counts[module, slot] = len(rows)
        scales[module, slot] = scale

    def clear(self, slot: int) -> None:
        """Let a slot leave every module as it is."""
        self._host[1][:, slot] = 0

    def upload(self) -> None:
        """Bring what has changed to the device, for all launches after this."""
        for ours, host in zip(self.tensors, self._host, strict=True):
            ours.copy_(host)


def slot_embed(
    out: torch.Tensor, ids: torch.Tensor, index: torch.Tensor, table: SlotRows, module: int
) -> None:
    """out[t] = scale * the row of ids[t] of the slot index[t], where it has one.

    out [tokens, n] with the last stride 1; ids [tokens] int64; index [tokens] int32, -1 for the base.
    """
    tokens, n = out.shape
    if ids.shape != (tokens,) or index.shape != (tokens,) or out.stride(1) != 1:
        raise ValueError(
            f"Invalid shapes: expected ids and index [{tokens}] for out {list(out.shape)}, got "
            f"{list(ids.shape)} and {list(index.shape)}"
        )
    launch(
        _embed, (tokens, triton.cdiv(n, COLUMNS)),
        out, ids, index, *table.where[module], table.counts[module], table.scales[module],
        table.slots, out.stride(0), n,
        COLUMNS=COLUMNS, IDS=IDS, TYPE=TYPES[table.dtype], num_warps=4,
    )  # fmt: skip


def slot_product(out: torch.Tensor, x: torch.Tensor, plan: AdapterPlan, table: SlotRows, module: int) -> None:
    """out[t, id of row r] = x[t] . row r + bias[r], for the rows of each token's slot.

    out [tokens, ids], x [tokens, n], both with the last stride 1. Tiles of a slot read its rows side by side.
    """
    n = x.shape[1]
    if out.shape[0] != plan.tokens or x.shape[0] != plan.tokens or out.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(
            f"Invalid shapes: expected out and x [{plan.tokens}, ...], got {list(out.shape)} and "
            f"{list(x.shape)}"
        )
    blocks = triton.cdiv(out.shape[1], ROWS)
    launch(
        _product, (plan.tiles, min(blocks, PROGRAMS)),
        out, x, *table.where[module], table.counts[module], plan.slot, plan.token,
        table.slots, out.stride(0), x.stride(0), n,
        TILE=plan.tile, ROWS=ROWS, BLOCK=128 if table.dtype.itemsize == 2 else 32, TYPE=TYPES[table.dtype],
        PRECISION=_precision(x.dtype, table.dtype), UP=x.device.type == "cpu", num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["slots"],
    do_not_specialize_on_alignment=["ROWS", "IDS_OF", "BIASES", "COUNTS", "SCALES"],
)
def _embed(
    OUT, TOKEN_IDS, INDEX, ROWS, IDS_OF, BIASES, COUNTS, SCALES, slots, out_token, n,
    COLUMNS: tl.constexpr, IDS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """OUT[token, some columns] = the row of the token's id, as its slot has it.

    ROWS, IDS_OF, COUNTS, SCALES [slots]: the address of rows [count, n] of TYPE, and of their ids.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(INDEX + token)
    if (slot < 0) | (slot >= slots):
        return
    count = tl.load(COUNTS + slot)
    if count == 0:
        return
    wanted = tl.load(TOKEN_IDS + token)
    address = tl.load(IDS_OF + slot)
    row = tl.where(address == 0, wanted, -1)
    if address != 0:
        ids = address.to(tl.pointer_type(tl.int64))
        for start in range(0, count, IDS):
            place = start + tl.arange(0, IDS)
            own = tl.load(ids + place, mask=place < count, other=-1)
            row = tl.maximum(row, tl.max(tl.where(own == wanted, place, -1), 0).to(tl.int64))
    if (row < 0) | (row >= count):
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.multiple_of(tl.load(ROWS + slot).to(tl.pointer_type(TYPE)), 16)
    found = tl.load(rows + row * n + column, mask=column < n, other=0.0).to(tl.float32)
    found = found * tl.load(SCALES + slot)
    tl.store(OUT + token * out_token + column, found.to(OUT.dtype.element_ty), mask=column < n)


@triton.jit(
    do_not_specialize=["slots"],
    do_not_specialize_on_alignment=["ROWS_OF", "IDS_OF", "BIASES", "COUNTS", "SLOT", "TOKEN"],
)
def _product(
    OUT, X, ROWS_OF, IDS_OF, BIASES, COUNTS, SLOT, TOKEN, slots, out_token, x_token, n,
    TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """OUT[token, ids] = X[token] W^T + bias for the tokens of a tile and every `programs`-th ROWS rows of W.

    ROWS_OF, IDS_OF, BIASES, COUNTS [slots]: the address of W [count, n] of TYPE, of its rows' ids, of biases.
    """
    tile = tl.program_id(0)
    slot = tl.load(SLOT + tile)
    token = tl.load(TOKEN + tile * TILE + tl.arange(0, TILE))
    if slot < 0:
        return
    count = tl.load(COUNTS + slot)
    weights = tl.multiple_of(tl.load(ROWS_OF + slot).to(tl.pointer_type(TYPE)), 16)
    ids = tl.load(IDS_OF + slot)
    biases = tl.load(BIASES + slot)
    there = token >= 0
    token = tl.where(there, token, 0).to(tl.int64)
    for first in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < count
        sums = tl.zeros([TILE, ROWS], tl.float32)
        for start in range(0, n, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(
                X + token[:, None] * x_token + column[None, :],
                mask=there[:, None] & (column[None, :] < n),
                other=0.0,
            )
            w = tl.load(
                weights + row[None, :].to(tl.int64) * n + column[:, None],
                mask=inside[None, :] & (column[:, None] < n),
                other=0.0,
            )
            if UP:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            else:
                x = x.to(w.dtype)
            sums = tl.dot(x, w, sums, input_precision=PRECISION)
        bias = tl.load(biases.to(tl.pointer_type(tl.float32)) + row, mask=inside & (biases != 0), other=0.0)
        to = tl.load(ids.to(tl.pointer_type(tl.int64)) + row, mask=inside & (ids != 0), other=0)
        to = tl.where(ids == 0, row.to(tl.int64), to)
        tl.store(
            OUT + token[:, None] * out_token + to[None, :],
            (sums + bias[None, :]).to(OUT.dtype.element_ty),
            mask=there[:, None] & inside[None, :],
        )
