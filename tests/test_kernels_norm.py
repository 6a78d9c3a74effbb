"""Root-mean-square norms against float64 and against the rounding of transformers' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_cases import DEVICE, GPU, load

kernels = load()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5
# The interpreter cuts off where bfloat16 should be rounded: twice the error, and other bits than torch's.
ERROR = {FP32: 2e-6, FP16: 2e-3, BF16: 1.6e-2 if GPU else 3.2e-2}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def noise(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def eager(x: torch.Tensor, weight: torch.Tensor, centered: bool) -> torch.Tensor:
    """LlamaRMSNorm's forward, or GemmaRMSNorm's."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h * (1.0 + weight.float())).to(x.dtype) if centered else weight * h.to(x.dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, centered: bool) -> torch.Tensor:
    h = x.double()
    return h * (h.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * (weight.double() + (1 if centered else 0))


def check(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, centered: bool) -> None:
    wanted, rounded = exact(x, weight, centered), eager(x, weight, centered)
    assert (got.shape, got.dtype) == (rounded.shape, rounded.dtype)
    coarser = max(ERROR[x.dtype], ERROR[got.dtype])
    torch.testing.assert_close(got.double(), wanted, rtol=coarser, atol=coarser / 100)
    if x.dtype != FP32 and (GPU or x.dtype != BF16):
        # Sums in another order move h by a few fp32 digits, which a 16-bit rounding hides but for one element
        # in hundreds.
        assert (got != rounded).sum() <= max(1, got.numel() // 100)


def verify(x: torch.Tensor, centered: bool = False) -> None:
    weight = noise(x.shape[-1], seed=1).to(x.dtype)
    check(kernels.rms_norm(x, weight, EPS, centered=centered), x, weight, centered)
    residual = noise(*x.shape, seed=2).to(x.dtype)
    total, normed = kernels.add_rms_norm(x, residual, weight, EPS, centered=centered)
    if GPU or x.dtype != BF16:
        assert torch.equal(total, residual + x)
    torch.testing.assert_close(total, residual + x, rtol=ERROR[BF16] if x.dtype == BF16 else 0, atol=0)
    check(normed, total, weight, centered)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(
    "shape", [(3, 4096), (5, 2, 80), (7, 1, 3, 96), (130, 8), (1, 1, 1000), (2, 1), (96,)]
)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, centered: bool) -> None:
    verify(noise(*shape, dtype=dtype), centered)


@pytest.mark.parametrize("n", [1025, 14336, 16384])
def test_wide_rows(n: int) -> None:
    verify(noise(2, n, dtype=FP16))


def test_heads_of_a_wider_product() -> None:
    """Heads of queries cut out of one product of queries, keys and values, NaN around them."""
    wide = torch.full((3, 2, 10, 40), torch.nan, device=DEVICE)
    wide[:, :, 2:7, :24] = noise(3, 2, 5, 24)
    verify(wide[:, :, 2:7, :24])


@pytest.mark.parametrize("new", [1, 3])
def test_transposed_heads_keep_their_order_in_memory(new: int) -> None:
    x = noise(2, new, 4, 16).transpose(1, 2)
    verify(x)
    assert kernels.rms_norm(x, noise(16), EPS).stride() == x.stride()


def test_distances_that_two_numbers_do_not_say() -> None:
    verify(noise(4, 6, 8, 32)[::2, ::3, ::2, :16])
    verify(noise(16)[None, None].expand(3, 2, 16))


def test_x_and_residual_lie_differently() -> None:
    x, residual = noise(3, 4, 5, 16), noise(5, 4, 3, 16, seed=3).transpose(0, 2)
    total, normed = kernels.add_rms_norm(x, residual, noise(16), EPS)
    assert torch.equal(total, x + residual)
    check(normed, total, noise(16), False)


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [(FP16, FP32), (FP32, FP16), (FP16, BF16)])
def test_weights_of_another_dtype(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = noise(4, 128, dtype=x_dtype), noise(128, dtype=weight_dtype, seed=1)
    for centered in (False, True):
        check(kernels.rms_norm(x, weight, EPS, centered=centered), x, weight, centered)


def test_total_is_rounded_before_it_is_normed() -> None:
    x, residual, weight = (
        noise(8, 256, dtype=FP16),
        noise(8, 256, dtype=FP16, seed=2) * 100,
        noise(256, dtype=FP16, seed=3),
    )
    total, normed = kernels.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(normed, kernels.rms_norm(total, weight, EPS))


def test_into_a_given_tensor() -> None:
    x, weight = noise(5, 48), noise(48, seed=1)
    expected = kernels.rms_norm(x, weight, EPS)
    wide = torch.full((5, 64), torch.nan, device=DEVICE)
    assert kernels.rms_norm(x, weight, EPS, out=wide[:, :48]).data_ptr() == wide.data_ptr()
    assert torch.equal(wide[:, :48], expected)
    assert wide[:, 48:].isnan().all()
    kernels.rms_norm(x, weight, EPS, out=x)
    assert torch.equal(x, expected)


def test_nothing_to_norm() -> None:
    assert kernels.rms_norm(noise(0, 3, 16), noise(16), EPS).shape == (0, 3, 16)
    assert [x.shape for x in kernels.add_rms_norm(noise(2, 0, 16), noise(2, 0, 16), noise(16), EPS)] == [
        (2, 0, 16)
    ] * 2


def test_refuses_what_does_not_fit() -> None:
    x, weight = noise(3, 16), noise(16)
    with pytest.raises(ValueError, match=r"Invalid shape of weight: expected \[16\], got \[8\]"):
        kernels.rms_norm(x, weight[:8], EPS)
    with pytest.raises(ValueError, match="Invalid shape of x"):
        kernels.rms_norm(noise(16, 3).t(), weight, EPS)
    with pytest.raises(ValueError, match="Invalid shape of x"):
        kernels.rms_norm(noise(1, 16385), noise(16385), EPS)
    with pytest.raises(
        ValueError, match=r"Invalid shape of out: expected \[3, 16\] of torch.float32, got \[2, 16\]"
    ):
        kernels.rms_norm(x, weight, EPS, out=x[:2])
    with pytest.raises(ValueError, match="Invalid shape of out"):
        kernels.rms_norm(x, weight, EPS, out=x.half())
    with pytest.raises(ValueError, match="Invalid strides of out"):
        kernels.rms_norm(x, weight, EPS, out=noise(16, 3).t())
    with pytest.raises(ValueError, match=r"Invalid shape of residual: expected \[3, 16\]"):
        kernels.add_rms_norm(x, x[:1], weight, EPS)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("n", [64, 128, 896, 2048, 4096, 5120, 8192])
def test_matrix(n: int, dtype: torch.dtype) -> None:
    for rows in (1, 17, 256):
        verify(noise(rows, 1, n, dtype=dtype))
        verify(noise(rows, 1, n, dtype=dtype), centered=True)
