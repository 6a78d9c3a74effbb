"""Put new tokens' keys and values into their slots of the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch


def write(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write token j of row i to slot slots[i * new + j]; slot -1 writes nothing.

    new_keys and new_values [rows, heads, new, dim]; keys and values [blocks, block_size, heads, dim] of one
    layer, any strides with the last 1; slots [rows * new], int32 or int64: slot s is token s % block_size of
    block s // block_size.
    """
    rows, heads, new, key_dim = new_keys.shape
    value_dim = new_values.shape[3]
    if (
        new_values.shape[:3] != new_keys.shape[:3]
        or keys.shape[2:] != (heads, key_dim)
        or values.shape[2:] != (heads, value_dim)
    ):
        raise ValueError(
            f"Invalid shape of new tokens: keys {list(new_keys.shape)} and values {list(new_values.shape)} "
            f"do not fit the cache's {list(keys.shape)} and {list(values.shape)}"
        )
    if slots.shape != (rows * new,):
        raise ValueError(f"Invalid shape of slots: expected [{rows * new}], got {list(slots.shape)}")
    if any(x.stride(3) != 1 for x in (new_keys, new_values, keys, values)):
        raise ValueError("Invalid strides: the last of keys and values, new and cached, must be 1")
    pairs = rows * new * heads
    key_dims = triton.next_power_of_2(key_dim)
    value_dims = triton.next_power_of_2(value_dim)
    at_once = max(1, 4096 // max(key_dims, value_dims))
    if pairs == 0:
        return
    launch(
        _write, (triton.cdiv(pairs, at_once),),
        new_keys, new_values, keys, values, slots, pairs, new, *new_keys.stride()[:3],
        *new_values.stride()[:3],
        KEY_BLOCK=keys.stride(0), KEY_TOKEN=keys.stride(1), KEY_HEAD=keys.stride(2),
        VALUE_BLOCK=values.stride(0), VALUE_TOKEN=values.stride(1), VALUE_HEAD=values.stride(2),
        HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, KEY_DIMS=key_dims, VALUE_DIMS=value_dims,
        PAGE=keys.shape[1],
        AT_ONCE=at_once, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["new"])
def _write(
    NEW_K, NEW_V, K, V, SLOTS, pairs, new, k_row, k_head, k_new, v_row, v_head, v_new,
    KEY_BLOCK: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_HEAD: tl.constexpr,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    PAGE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """K[s // PAGE, s % PAGE, h] = NEW_K[i, h, j] with s = SLOTS[i * new + j] if that is not negative; V
    likewise.

    NEW_K, NEW_V [rows, HEADS, new, dim]; K, V [blocks, PAGE, HEADS, dim]; SLOTS [rows * new]. A program moves
    AT_ONCE pairs of token and head.
    """
    pair = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    real = pair < pairs
    token = pair // HEADS
    head = (pair % HEADS).to(tl.int64)
    slot = tl.load(SLOTS + token, mask=real, other=-1).to(tl.int64)
    kept = slot >= 0
    row = (token // new).to(tl.int64)
    position = (token % new).to(tl.int64)
    block = slot // PAGE
    inside = slot % PAGE
    source = NEW_K + row * k_row + head * k_head + position * k_new
    target = K + block * KEY_BLOCK + inside * KEY_TOKEN + head * KEY_HEAD
    _move(source, target, real, kept, KEY_DIM, KEY_DIMS)
    source = NEW_V + row * v_row + head * v_head + position * v_new
    target = V + block * VALUE_BLOCK + inside * VALUE_TOKEN + head * VALUE_HEAD
    _move(source, target, real, kept, VALUE_DIM, VALUE_DIMS)


@triton.jit
def _move(source, target, real, kept, DIM: tl.constexpr, DIMS: tl.constexpr):
    """Copy DIM elements from each of the pointers `source` [n] to `target` [n], read where `real`, written
    where `kept`.
    """
    dims = tl.arange(0, DIMS)
    x = tl.load(source[:, None] + dims[None, :], mask=real[:, None] & (dims < DIM)[None, :])
    tl.store(
        target[:, None] + dims[None, :],
        x.to(target.dtype.element_ty),
        mask=kept[:, None] & (dims < DIM)[None, :],
    )
