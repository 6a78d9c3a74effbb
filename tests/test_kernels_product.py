"""Products in one order against torch's."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, GPU, load

kernels = load()
DTYPES = [
    torch.float32,
    torch.float16,
    *([torch.bfloat16] if GPU else []),
]  # the interpreter multiplies no bfloat16
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: torch.Tensor, right: torch.Tensor, depth: int) -> None:
    error = ROUNDING[found.dtype] * depth**0.5
    torch.testing.assert_close(found.double(), right, rtol=0, atol=error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 7, 33), (20, 64, 256), (70, 130, 150), (260, 40, 16)]
)
def test_layers(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    """With a bias and without; weights kept either way; rows that lie apart."""
    x, bias = noise(rows, 2 * depth, dtype=dtype)[:, ::2], noise(columns, dtype=dtype, seed=1)
    for w in (noise(columns, depth, dtype=dtype, seed=2).t(), noise(depth, columns, dtype=dtype, seed=2)):
        right = x.double() @ w.double()
        close(kernels.product(x[None], w[None])[0], right, depth)
        close(kernels.product(x[None], w[None], bias)[0], right + bias.double(), depth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches(dtype: torch.dtype) -> None:
    x, w = noise(5, 3, 40, dtype=dtype), noise(5, 40, 9, dtype=dtype)
    close(kernels.product(x, w), x.double() @ w.double(), 40)


def test_more_batches_than_a_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.product.__globals__, "MOST_BATCHES", 2)
    x, w = noise(5, 3, 40, dtype=torch.float32), noise(5, 40, 9, dtype=torch.float32)
    close(kernels.product(x, w), x.double() @ w.double(), 40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: torch.dtype) -> None:
    """Some without rows, and rows without an expert."""
    x, w = noise(90, 48, dtype=dtype), noise(6, 48, 20, dtype=dtype)
    ends = torch.tensor([0, 5, 5, 75, 76, 80], dtype=torch.int32, device=DEVICE)
    found = kernels.product(x[None], w, ends=ends)[0]
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        close(found[begin:end], x[begin:end].double() @ w[expert].double(), 48)
        begin = end
    assert not found[80:].any()


def test_nothing() -> None:
    assert kernels.product(
        torch.zeros(1, 0, 8, device=DEVICE), torch.zeros(1, 8, 4, device=DEVICE)
    ).shape == (1, 0, 4)


def test_refused() -> None:
    x = torch.zeros(1, 3, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"Invalid shape of w: expected \[1, 8, columns\], got \[1, 9, 4\]"):
        kernels.product(x, torch.zeros(1, 9, 4, device=DEVICE))
    with pytest.raises(
        ValueError, match=r"Invalid dtype of w or bias: expected torch.float32, got torch.float16"
    ):
        kernels.product(x, torch.zeros(1, 8, 4, dtype=torch.float16, device=DEVICE))
    with pytest.raises(ValueError, match=r"Invalid shape of ends: expected \[2\]"):
        kernels.product(
            x, torch.zeros(2, 8, 4, device=DEVICE), ends=torch.zeros(3, dtype=torch.int32, device=DEVICE)
        )
