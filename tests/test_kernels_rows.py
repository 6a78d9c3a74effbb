"""Sums, softmaxes and functions against torch's, and without regard to order or place."""

from __future__ import annotations

import pytest
import torch
from functions import FUNCTIONS, OF_SIZES
from kernel_cases import DEVICE, load

kernels = load()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's way to infinity and NaN
KINDS = ("sum", "mean", "softmax", "log_softmax", "logsumexp")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def right(kind: str, x: torch.Tensor) -> torch.Tensor:
    answer: torch.Tensor = getattr(torch, kind)(x, -1)
    return answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 7, 64, 300, 5000])
def test_torchs_answer(kind: str, width: int) -> None:
    x = noise(5, width)
    found = kernels.rows(kind, x)
    torch.testing.assert_close(found.double(), right(kind, x.double()), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mean"])
@pytest.mark.parametrize("width", [9, 5000])
def test_order_and_place_change_no_bit(kind: str, width: int) -> None:
    """C44: numbers in another order, with nothing between them, and other rows beside them."""
    x = noise(3, width)
    found = kernels.rows(kind, x)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    wide = torch.full((1, 2 * width), 0.0 if kind == "sum" else -torch.inf, device=DEVICE)
    wide[0, 1::2] = x[1, order]
    again = kernels.rows(kind, wide)[0]
    assert torch.equal(
        again[1::2] if again.dim() else again, found[1, order] if found.dim() > 1 else found[1]
    )


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_sums_of_all_sizes(scale: float) -> None:
    x = noise(4, 100) * scale
    torch.testing.assert_close(
        kernels.rows("sum", x).double(), x.double().sum(-1), rtol=1e-5, atol=scale * 1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number(kind: str) -> None:
    x = torch.tensor([[torch.nan, 1.0], [-torch.inf, 0.0], [0.0, 0.0], [2.0, torch.nan]], device=DEVICE)
    torch.testing.assert_close(kernels.rows(kind, x), right(kind, x), equal_nan=True)
    infinite = torch.tensor([[torch.inf, 1.0]], device=DEVICE)
    assert not kernels.rows(kind, infinite).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 100, 3000])
def test_running_sums(width: int, dtype: torch.dtype) -> None:
    x = noise(3, width).to(dtype)
    found = kernels.rows("cumsum", x)
    torch.testing.assert_close(found, x.cumsum(-1), rtol=1e-5, atol=1e-3 if dtype == torch.float32 else 1e-9)
    assert found.dtype == dtype
    assert torch.equal(kernels.rows("cumsum", x[1:2])[0], found[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions(kind: str, dtype: torch.dtype) -> None:
    x = noise(3, 700).to(dtype)
    x = x.abs() + 0.1 if kind in OF_SIZES else x
    found = kernels.mapped(kind, x.to(dtype), 1.7)
    error = 3e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found, FUNCTIONS[kind](x.float()).to(dtype), rtol=error, atol=error)


def test_refused() -> None:
    x = noise(2, 3)
    with pytest.raises(ValueError, match="Invalid kind 'product': expected one of sum, softmax"):
        kernels.rows("product", x)
    with pytest.raises(ValueError, match="Invalid kind 'floor': expected one of exp, log"):
        kernels.mapped("floor", x)
    with pytest.raises(
        ValueError, match=r"expected \[rows, width\] in float32, got \[2, 3\] in torch.float16"
    ):
        kernels.rows("sum", x.half())
