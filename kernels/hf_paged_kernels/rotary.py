"""Rotary positions for queries and keys in one launch, which may put the keys and values into the cache as
well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import early, follow, launch

TILE = 512


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q * cos + rotate_half(q) * sin, the same of k), each product and the sum rounded to their dtype, as
    torch does.

    q [rows, query_heads, new, dim] and k [rows, heads, new, dim], any strides with the last 1; cos and sin
    [rows or 1, new, rotary_dim], the last stride 1; rotate_half(x) = cat(-x[half:], x[:half]) of the first
    rotary_dim dimensions, the others pass unchanged. The answers have the shapes of q and k and lie as [rows,
    new, heads, dim] does.
    """
    _check(q, k, cos, sin)
    rows, heads, new, dim = k.shape
    k_out = k.new_empty(rows, new, heads, dim)
    q_out = _launch(q, k, None, cos, sin, k_out.view(rows * new, 1, heads, dim), None, None)
    return q_out, k_out.transpose(1, 2)


def rotary_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """rotary(q, k, cos, sin), of which q is the answer; k so rotated and v go to the cache: token j of row i
    to slots[i * new + j].

    q, k, cos, sin as for rotary(); v [rows, heads, new, value_dim]; keys and values [blocks, block_size,
    heads, dim] of one layer, any strides with the last 1; slots [rows * new], int32 or int64: slot s is token
    s % block_size of block s // block_size, slot -1 writes nothing.
    """
    _check(q, k, cos, sin)
    rows, heads, new, dim = k.shape
    if v.ndim != 4 or v.shape[:3] != k.shape[:3] or v.stride(3) != 1:
        raise ValueError(
            f"Invalid shape of v: expected [{rows}, {heads}, {new}, value_dim] with the last stride 1, got "
            f"{list(v.shape)}"
        )
    for name, data, width in (("keys", keys, dim), ("values", values, v.shape[3])):
        if (
            data.ndim != 4
            or data.shape[:2] != keys.shape[:2]
            or data.shape[2:] != (heads, width)
            or data.stride(3) != 1
        ):
            expected = [*keys.shape[:2], heads, width]
            raise ValueError(
                f"Invalid shape of {name}: expected {expected} with the last stride 1, got {list(data.shape)}"
            )
    if not q.dtype == v.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"Invalid dtypes: q, v, keys and values must share one, got {q.dtype}, {v.dtype}, {keys.dtype}, "
            f"{values.dtype}"
        )
    if slots.shape != (rows * new,) or not slots.is_contiguous():
        raise ValueError(f"Invalid shape of slots: expected [{rows * new}], got {list(slots.shape)}")
    return _launch(q, k, v, cos, sin, keys, values, slots)


def _check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if q.ndim != 4 or q.stride(3) != 1:
        raise ValueError(
            "Invalid shape of q: expected [rows, query_heads, new, dim] with the last stride 1, got "
            f"{list(q.shape)}"
        )
    rows, _, new, dim = q.shape
    if k.ndim != 4 or (k.shape[0], *k.shape[2:]) != (rows, new, dim) or k.stride(3) != 1:
        raise ValueError(
            f"Invalid shape of k: expected [{rows}, heads, {new}, {dim}] with the last stride 1, got "
            f"{list(k.shape)}"
        )
    if (
        cos.ndim != 3
        or cos.shape[0] not in (1, rows)
        or cos.shape[1] != new
        or cos.shape[2] % 2
        or not 2 <= cos.shape[2] <= dim
    ):
        raise ValueError(
            f"Invalid shape of cos: expected [1 or {rows}, {new}, an even number up to {dim}], got "
            f"{list(cos.shape)}"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"Invalid shape of sin: expected {list(cos.shape)}, got {list(sin.shape)}")
    if cos.stride(2) != 1 or sin.stride(2) != 1:
        raise ValueError(
            f"Invalid strides of cos or sin: the last must be 1, got {cos.stride()} and {sin.stride()}"
        )
    if not q.dtype == k.dtype == cos.dtype == sin.dtype:
        raise ValueError(
            f"Invalid dtypes: q, k, cos and sin must share one, got {q.dtype}, {k.dtype}, {cos.dtype}, "
            f"{sin.dtype}"
        )


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    """A program for each token and each AT_ONCE heads of q, of k and of v; without slots token t is written
    to keys[t, 0].
    """
    rows, query_heads, new, dim = q.shape
    heads = k.shape[1]
    q_out = q.new_empty(rows, new, query_heads, dim)
    if rows * new * query_heads * heads == 0:
        return q_out.transpose(1, 2)
    write = slots is not None
    if not write:
        v = k
        values = keys
        slots = q
    half = cos.shape[2] // 2
    value_dim = v.shape[3]
    halves = triton.next_power_of_2(half)
    value_dims = triton.next_power_of_2(value_dim)
    at_once = max(1, TILE // halves)
    values_at_once = max(1, 2 * TILE // value_dims)
    q_tiles = triton.cdiv(query_heads, at_once)
    k_tiles = triton.cdiv(heads, at_once)
    launch(
        _rotary, (rows * new, q_tiles + k_tiles + (triton.cdiv(heads, values_at_once) if write else 0)),
        q, k, v, cos, sin, q_out, keys, values, slots, new, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), sin.stride(0) if sin.shape[0] > 1 else 0,
        sin.stride(1),
        KEY_BLOCK=keys.stride(0), KEY_TOKEN=keys.stride(1), KEY_HEAD=keys.stride(2),
        VALUE_BLOCK=values.stride(0), VALUE_TOKEN=values.stride(1), VALUE_HEAD=values.stride(2),
        Q_HEADS=query_heads, HEADS=heads, DIM=dim, HALF=half, HALVES=halves,
        RESTS=triton.next_power_of_2(dim - 2 * half),
        VALUE_DIM=value_dim, VALUE_DIMS=value_dims, PAGE=keys.shape[1], WRITE=write, AT_ONCE=at_once,
        VALUES_AT_ONCE=values_at_once, Q_TILES=q_tiles, K_TILES=k_tiles, num_warps=4, enable_fp_fusion=False,
        **early(q.device),
    )  # fmt: skip
    return q_out.transpose(1, 2)


@triton.jit(do_not_specialize_on_alignment=["new"])
def _rotary(
    Q, K, V, COS, SIN, Q_OUT, KEYS, VALUES, SLOTS, new, q_row, q_head, q_new, k_row, k_head, k_new, v_row,
    v_head, v_new,
    cos_row, cos_new, sin_row, sin_new,
    KEY_BLOCK: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_HEAD: tl.constexpr,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr,
    RESTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, PAGE: tl.constexpr, WRITE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    VALUES_AT_ONCE: tl.constexpr, Q_TILES: tl.constexpr, K_TILES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Q_OUT[i, j, h] = rotated(Q[i, h, j]); KEYS[s // PAGE, s % PAGE, h] = rotated(K[i, h, j]) and
    VALUES[...] = V[i, h, j].

    With s = SLOTS[i * new + j] if WRITE, nothing written if it is negative; else s = i * new + j and no
    values. Q [rows, Q_HEADS, new, DIM]; K [rows, HEADS, new, DIM]; V [rows, HEADS, new, VALUE_DIM]; COS, SIN
    [rows, new, 2 * HALF]; Q_OUT [rows, new, Q_HEADS, DIM]; KEYS [blocks, PAGE, HEADS, DIM]; VALUES [blocks,
    PAGE, HEADS, VALUE_DIM]; SLOTS [rows * new].
    """
    follow(EARLY)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = (tl.program_id(0) // new).to(tl.int64)
    position = (tl.program_id(0) % new).to(tl.int64)
    cos = COS + row * cos_row + position * cos_new
    sin = SIN + row * sin_row + position * sin_new
    slot = token
    if WRITE:
        slot = tl.load(SLOTS + token).to(tl.int64)
    if tile < Q_TILES:
        source = Q + row * q_row + position * q_new
        target = Q_OUT + token * (Q_HEADS * DIM)
        _rotate(
            source,
            target,
            q_head,
            DIM,
            tile * AT_ONCE,
            Q_HEADS,
            True,
            cos,
            sin,
            DIM,
            HALF,
            HALVES,
            RESTS,
            AT_ONCE,
        )
    elif tile < Q_TILES + K_TILES:
        source = K + row * k_row + position * k_new
        target = KEYS + slot // PAGE * KEY_BLOCK + slot % PAGE * KEY_TOKEN
        first = (tile - Q_TILES) * AT_ONCE
        _rotate(
            source,
            target,
            k_head,
            KEY_HEAD,
            first,
            HEADS,
            slot >= 0,
            cos,
            sin,
            DIM,
            HALF,
            HALVES,
            RESTS,
            AT_ONCE,
        )
    else:
        source = V + row * v_row + position * v_new
        target = VALUES + slot // PAGE * VALUE_BLOCK + slot % PAGE * VALUE_TOKEN
        head = (tile - Q_TILES - K_TILES) * VALUES_AT_ONCE + tl.arange(0, VALUES_AT_ONCE)
        _move(
            source, target, v_head, VALUE_HEAD, head, (head < HEADS) & (slot >= 0), 0, VALUE_DIM, VALUE_DIMS
        )


@triton.jit
def _rotate(
    source, target, source_head, target_head, first, heads, kept, cos, sin,
    DIM: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr, RESTS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """target[h] = source[h] * cos + cat(-source[h, HALF:], source[h, :HALF]) * sin for AT_ONCE heads from
    `first`, if kept.

    source, target [heads, DIM] of one token; cos, sin [2 * HALF]; what is behind 2 * HALF is copied.
    """
    head = first + tl.arange(0, AT_ONCE)
    half = tl.arange(0, HALVES)
    real = (head < heads) & kept
    inside = half < HALF
    both = real[:, None] & inside[None, :]
    at = source + head.to(tl.int64)[:, None] * source_head + half[None, :]
    left = tl.load(at, mask=both, other=0.0)
    right = tl.load(at + HALF, mask=both, other=0.0)
    left_cos = tl.load(cos + half, mask=inside, other=0.0)[None, :]
    left_sin = tl.load(sin + half, mask=inside, other=0.0)[None, :]
    right_cos = tl.load(cos + HALF + half, mask=inside, other=0.0)[None, :]
    right_sin = tl.load(sin + HALF + half, mask=inside, other=0.0)[None, :]
    to = target + head.to(tl.int64)[:, None] * target_head + half[None, :]
    turned = (_product(left, left_cos) - _product(right, left_sin)).to(left.dtype)
    tl.store(to, turned.to(to.dtype.element_ty), mask=both)
    turned = (_product(right, right_cos) + _product(left, right_sin)).to(left.dtype)
    tl.store(to + HALF, turned.to(to.dtype.element_ty), mask=both)
    if 2 * HALF < DIM:
        _move(source, target, source_head, target_head, head, real, 2 * HALF, DIM, RESTS)


@triton.jit
def _product(x, y):
    """x * y rounded to their dtype, in fp32."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _move(
    source,
    target,
    source_head,
    target_head,
    head,
    kept,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """target[h, FIRST:DIM] = source[h, FIRST:DIM] for the heads `head` that are kept, DIMS >= DIM - FIRST
    lanes each.
    """
    dims = FIRST + tl.arange(0, DIMS)
    mask = kept[:, None] & (dims < DIM)[None, :]
    x = tl.load(source + head.to(tl.int64)[:, None] * source_head + dims[None, :], mask=mask)
    to = target + head.to(tl.int64)[:, None] * target_head + dims[None, :]
    tl.store(to, x.to(to.dtype.element_ty), mask=mask)
