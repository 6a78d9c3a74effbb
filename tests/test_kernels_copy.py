"""Copying blocks: all pairs, all layers, keys and values, in one launch."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, GPU, load

kernels = load()


def check(pools: list[torch.Tensor], sources: list[int], targets: list[int]) -> None:
    """The kernel against indexing, bit by bit."""
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        for source, target in zip(sources, targets, strict=True):
            if source >= 0 and target >= 0:
                pool[:, target] = pool[:, source]
    kernels.copy(pools, *(torch.tensor(ids, device=DEVICE, dtype=torch.int32) for ids in (sources, targets)))
    for pool, wanted in zip(pools, expected, strict=True):
        torch.testing.assert_close(pool, wanted, rtol=0, atol=0, equal_nan=True)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pool_of_keys_and_values(dtype: torch.dtype) -> None:
    check([noise(3, 7, 2, 2, 4, 16, dtype=dtype)], [0, 1, 1, 6], [2, 3, 4, 5])


def test_keys_and_values_apart_and_of_two_widths() -> None:
    check([noise(2, 6, 4, 2, 16), noise(2, 6, 4, 2, 24)], [0, 5], [3, 1])


def test_layers_of_a_larger_pool() -> None:
    pool = noise(4, 9, 2, 2, 4, 16)
    check([pool[1:3, 1:8]], [0, 6], [3, 1])
    check([pool[:, :, 0], pool[:, :, 1]], [0, 6], [3, 1])


def test_blocks_of_odd_sizes() -> None:
    for shape in ((2, 5, 3), (2, 5, 1, 1, 1, 7), (1, 5, 2)):
        check([noise(*shape, dtype=torch.bfloat16)], [0, 1], [4, 3])


def test_pairs_that_copy_nothing() -> None:
    check([noise(2, 5, 16)], [-1, 2, 1], [0, -1, 3])
    check([noise(2, 5, 16)], [], [])


def test_refuses_what_does_not_fit() -> None:
    ids = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="Invalid pools"):
        kernels.copy([noise(2, 5, 4), noise(2, 4, 4)], ids, ids)
    with pytest.raises(ValueError, match="Invalid shape of targets"):
        kernels.copy([noise(2, 5, 4)], ids, ids[:1])
    with pytest.raises(ValueError, match="must be contiguous"):
        kernels.copy([noise(2, 5, 4, 4).transpose(2, 3)], ids, ids)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_large_copy() -> None:
    check([noise(8, 300, 2, 8, 16, 128, dtype=torch.bfloat16)], list(range(100)), list(range(100, 200)))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_blocks_past_two_to_the_31() -> None:
    pool = torch.zeros(2, 2**31 // 2**18 + 4, 2**17, dtype=torch.bfloat16, device=DEVICE)
    pool[1, 3] = 7
    kernels.copy([pool], *(torch.tensor([i], device=DEVICE) for i in (3, pool.shape[1] - 1)))
    assert (pool[1, -1] == 7).all()
    assert int((pool[:, 4:] != 0).sum()) == 2**17
