"""Products of few rows against float64."""

from __future__ import annotations

import pytest
import torch
from test_kernels_reference import DEVICE, load

kernels = load()
Strip = kernels.tuning.Strip
BF16, FP16 = torch.bfloat16, torch.float16


def noise(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "n", "k", "strip"),
    [
        (1, 32, 64, Strip(16, 32, 1, 2)),
        (3, 40, 96, Strip(16, 64, 4, 3)),  # neither n nor k in whole tiles
        (16, 16, 128, Strip(32, 128, 4, 4)),
        (17, 33, 50, Strip(16, 32, 4, 3)),
        (64, 24, 64, Strip(64, 64, 4, 2)),
    ],
)
def test_the_formula(rows: int, n: int, k: int, strip: object, biased: bool, dtype: torch.dtype) -> None:
    x, weight = noise(rows, k, dtype=dtype, seed=0), noise(n, k, dtype=dtype, seed=1)
    bias = noise(n, dtype=dtype, seed=2) if biased else None
    wide = noise(rows, 2 * k, dtype=dtype, seed=0)
    wide[:, :k] = x
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for given in (x, wide[:, :k]):
        got = kernels.product(given, weight, bias, strip)
        assert got.shape == (rows, n)
        assert got.dtype == dtype
        assert float((got.double() - expected).norm() / expected.norm()) < (4e-3 if dtype == BF16 else 6e-4)


def test_rows_read_nothing_of_each_other() -> None:
    """A row that is NaN stays alone with it, and what lies behind the rows is not read."""
    x, weight = noise(5, 64, dtype=BF16, seed=0), noise(20, 64, dtype=BF16, seed=1)
    right = kernels.product(x, weight, None, Strip(16, 64, 4, 2))
    x[2] = torch.nan
    found = kernels.product(x[:4], weight, None, Strip(16, 64, 4, 2))
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], right[[0, 1, 3]])


def test_the_table_is_read_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = Strip(16, 128, 4, 4), Strip(64, 128, 4, 4)
    monkeypatch.setattr(kernels.tuning, "PRODUCTS", [(16, 4096, 4096, None), (16, 8192, 16384, few), (64, 8192, 16384, many)])
    found = [kernels.product_strip(*asked) for asked in ((1, 4096, 4096), (1, 6144, 4096), (16, 4096, 14336), (17, 4096, 4096))]
    assert found == [None, few, few, many]
    assert kernels.product_strip(65, 64, 64) is None
    assert kernels.product_strip(1, 28672, 64) is None


@pytest.mark.parametrize(
    ("x", "weight", "match"),
    [
        (torch.zeros(65, 8), torch.zeros(4, 8), "expected \\[1 to 64, 8\\]"),
        (torch.zeros(2, 7), torch.zeros(4, 8), "Invalid shape of x"),
        (torch.zeros(2, 8), torch.zeros(8, 4).T, "Invalid shape of weight"),
        (torch.zeros(2, 8), torch.zeros(4, 8), "Invalid dtypes"),
    ],
)
def test_errors_say_what_was_expected(x: torch.Tensor, weight: torch.Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        kernels.product(x.to(DEVICE), weight.to(DEVICE), None, Strip(16, 32, 4, 2))
