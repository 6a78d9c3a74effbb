"""Gated activations against torch's two steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_cases import DEVICE, GPU, load
from torch.nn.functional import gelu, silu

kernels = load()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ERROR = {FP32: 2e-6, FP16: 2e-3, BF16: 2e-2 if GPU else 4e-2}
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # the interpreter's way to infinity


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def noise(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def verify(gate: torch.Tensor, up: torch.Tensor) -> None:
    """Close, and but for a few elements the bits of torch, where the interpreter rounds at all (not
    bfloat16).
    """
    for name, activation in (("silu", silu), ("gelu_tanh", lambda x: gelu(x, approximate="tanh"))):
        got, expected = (
            kernels.swiglu(gate, up, activation=name),
            activation(gate.float()).to(gate.dtype) * up,
        )
        assert got.dtype == gate.dtype
        assert got.is_contiguous()
        torch.testing.assert_close(
            got, expected, rtol=ERROR[gate.dtype], atol=max(ERROR[gate.dtype] / 3, 5e-6)
        )
        if gate.dtype == FP16 or (GPU and gate.dtype == BF16):
            assert (got != expected).sum() <= max(
                1, got.numel() // 20
            )  # without the first rounding it would be a quarter


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("shape", [(1, 1, 14336), (3, 80), (2, 3, 1000), (5, 1025), (7, 8), (96,)])
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    verify(noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1))


def test_halves_of_one_product() -> None:
    for shape in ((4, 160), (2, 3, 1, 96)):
        verify(*noise(*shape, dtype=FP16).chunk(2, -1))
        verify(*reversed(noise(*shape).chunk(2, -1)))


def test_strided_rows() -> None:
    verify(noise(6, 5, 40)[::2, ::3, :24], noise(3, 2, 24, seed=1))
    verify(noise(4, 6, 8, 32)[::2, ::3, ::2, :16], noise(2, 2, 4, 16, seed=1))
    verify(noise(3, 2, 16).transpose(0, 1), noise(2, 3, 16, seed=1))


def test_far_values() -> None:
    gate = torch.tensor([0.0, -0.0, 50, -50, 1e4, -1e4, 3e38, -3e38, torch.inf, 1e-30, -1e-30], device=DEVICE)
    for name, activation in (("silu", silu), ("gelu_tanh", lambda x: gelu(x, approximate="tanh"))):
        torch.testing.assert_close(
            kernels.swiglu(gate, torch.ones_like(gate), activation=name), activation(gate)
        )
    assert kernels.swiglu(gate * torch.nan, gate).isnan().all()


def test_nothing_to_gate() -> None:
    assert kernels.swiglu(noise(0, 16), noise(0, 16)).shape == (0, 16)
    assert kernels.swiglu(noise(3, 0), noise(3, 0)).shape == (3, 0)


def test_refuses_what_does_not_fit() -> None:
    x = noise(3, 16)
    with pytest.raises(ValueError, match="Invalid activation 'relu': expected one of silu, gelu_tanh"):
        kernels.swiglu(x, x, activation="relu")
    with pytest.raises(ValueError, match="Invalid shape of gate"):
        kernels.swiglu(x.t(), x.t())
    with pytest.raises(
        ValueError,
        match=r"Invalid shape of up: expected \[3, 16\] of torch.float32, got \[3, 8\] of torch.float32",
    ):
        kernels.swiglu(x, x[:, :8])
    with pytest.raises(ValueError, match="Invalid shape of up"):
        kernels.swiglu(x, x.half())


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_matrix(dtype: torch.dtype) -> None:
    for rows in (1, 17, 256):
        for n in (896, 11008, 14336):
            verify(noise(rows, 1, n, dtype=dtype), noise(rows, 1, n, dtype=dtype, seed=1))
