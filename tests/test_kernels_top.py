"""The largest numbers of lines against torch.topk."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, GPU, load

kernels = load()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [FP32, FP16, *([BF16] if GPU else [])])
@pytest.mark.parametrize(
    ("lines", "n", "count"), [(1, 1, 1), (5, 8, 8), (7, 60, 4), (3, 128, 8), (2, 1000, 32)]
)
def test_torchs_answer(lines: int, n: int, count: int, dtype: torch.dtype) -> None:
    x = torch.randn(lines, n, generator=torch.Generator().manual_seed(n)).to(DEVICE, dtype)
    values, places = kernels.top(x, count)
    assert torch.equal(values, x.topk(count).values)
    assert torch.equal(x.gather(1, places), values)
    assert all(len(set(line)) == count for line in places.tolist())


@pytest.mark.parametrize("dtype", [FP32, FP16, *([BF16] if GPU else [])])
def test_the_largest_of_a_softmax(dtype: torch.dtype) -> None:
    """In fp32, also of lines with infinities."""
    x = torch.randn(5, 60, generator=torch.Generator().manual_seed(3)).mul(3).to(DEVICE, dtype)
    x[1, 7] = -torch.inf
    values, places = kernels.top(x, 6, softmax=True)
    expected = x.softmax(-1, dtype=torch.float32).topk(6)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected.values, rtol=1e-6, atol=1e-7)
    assert torch.equal(places, expected.indices)


def test_equal_numbers_come_by_their_places() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, -1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]], device=DEVICE)
    assert kernels.top(x, 4)[1].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_what_is_no_number() -> None:
    """Infinities keep their order, also behind what was taken; NaN is the largest."""
    low, high, nan = -torch.inf, torch.inf, torch.nan
    x = torch.tensor([[low, 2.0, high, low, -3.0], [nan, 1.0, high, low, 0.0]], device=DEVICE)
    values, places = kernels.top(x, 5)
    assert places.tolist() == [[2, 1, 4, 0, 3], [0, 2, 1, 4, 3]]
    assert torch.equal(values[0].cpu(), torch.tensor([high, 2.0, -3.0, low, low]))
    assert values[1, 0].isnan()


def test_lines_with_gaps() -> None:
    x = torch.randn(12, 9, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(kernels.top(x.T, 3)[0], x.T.topk(3).values)
    assert torch.equal(kernels.top(x[::2, 1::2], 2)[0], x[::2, 1::2].topk(2).values)


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"expected \[lines, n\] with 9 <= n <= 1024"):
        kernels.top(torch.zeros(2, 8, device=DEVICE), 9)
