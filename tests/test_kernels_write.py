"""Writing new tokens into the pool: every slot gets its token, no other byte changes."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, GPU, load

kernels = load()


def check(
    rows: int,
    new: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    dtype: torch.dtype,
    by_head: bool,
) -> None:
    random = torch.Generator().manual_seed(rows + new)
    count, blocks = rows * new, -(-rows * new // block_size) + 3
    slots = torch.randperm(blocks * block_size, generator=random)[:count]
    slots[::5] = -1
    tokens, pools = [], []
    for dim in (key_dim, value_dim):
        tokens.append(torch.randn(rows, new, heads, dim, generator=random).to(DEVICE, dtype).transpose(1, 2))
        shape = (blocks, heads, block_size, dim) if by_head else (blocks, block_size, heads, dim)
        pool = torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)
        pools.append(pool.transpose(1, 2) if by_head else pool)
    expected = [pool.clone() for pool in pools]
    kept = (slots >= 0).nonzero().flatten()
    for pool, new_tokens in zip(expected, tokens, strict=True):
        flat = new_tokens.transpose(1, 2).flatten(0, 1)
        pool[slots[kept].to(DEVICE) // block_size, slots[kept].to(DEVICE) % block_size] = flat[
            kept.to(DEVICE)
        ]
    kernels.write(*tokens, *pools, slots.to(DEVICE, torch.int32 if by_head else torch.int64))
    for pool, wanted in zip(pools, expected, strict=True):
        torch.testing.assert_close(pool, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(("rows", "new", "heads", "key_dim", "value_dim", "block_size"), [
    (1, 1, 2, 16, 16, 16), (3, 5, 2, 16, 16, 4), (2, 7, 3, 80, 24, 1), (7, 1, 40, 128, 128, 256), (1, 33, 8, 64, 96, 8),
])  # fmt: skip
def test_write(
    rows: int, new: int, heads: int, key_dim: int, value_dim: int, block_size: int, by_head: bool
) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if GPU else (torch.float32,):
        check(rows, new, heads, key_dim, value_dim, block_size, dtype, by_head)


def test_nothing_to_write() -> None:
    none, pool = torch.empty(0, 2, 1, 16, device=DEVICE), torch.empty(4, 4, 2, 16, device=DEVICE)
    kernels.write(none, none, pool, pool, torch.empty(0, dtype=torch.long, device=DEVICE))


def test_refuses_what_does_not_fit() -> None:
    tokens, pool = torch.zeros(1, 2, 3, 16, device=DEVICE), torch.zeros(4, 4, 2, 16, device=DEVICE)
    slots = torch.zeros(3, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.write(tokens, tokens[..., :8], pool, pool, slots)
    with pytest.raises(ValueError, match="Invalid shape of slots"):
        kernels.write(tokens, tokens, pool, pool, slots[:2])


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_slots_past_two_to_the_31() -> None:
    blocks = 2**31 // (16 * 8 * 128) + 2
    pool = torch.zeros(blocks, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    tokens = torch.randn(2, 8, 1, 128, device=DEVICE).to(pool)
    slots = torch.tensor([blocks * 16 - 1, 5], device=DEVICE)
    kernels.write(tokens, tokens, pool, pool, slots)
    assert torch.equal(pool[-1, -1], tokens[0, :, 0])
    assert torch.equal(pool[0, 5], tokens[1, :, 0])
    assert pool[-2:].count_nonzero() <= 8 * 128
