"""Products of few rows against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import DEVICE, GPU, assert_replays, load

kernels = load()
BF16, FP16 = torch.bfloat16, torch.float16
HALVES = [FP16, *([BF16] if GPU else [])]  # the interpreter multiplies no bfloat16


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def verify(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor] | None, got: torch.Tensor
) -> None:
    """Rounded once: off by half a step of the type and the sum's own error."""
    parts = [x.double() @ weight.double().T for weight in weights]
    if biases is not None:
        parts = [part + bias.double() for part, bias in zip(parts, biases, strict=True)]
    expected = torch.cat(parts, -1)
    assert got.shape == expected.shape
    size = torch.cat([x.double().abs() @ weight.double().abs().T for weight in weights], -1)
    step = expected.abs() * torch.finfo(x.dtype).eps / (2 if GPU else 1) + size * 2e-6
    assert ((got.double() - expected).abs() <= step).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("depth", [64, 2048, 2560])
def test_one_weight(rows: int, depth: int, dtype: torch.dtype) -> None:
    x = noise(rows, depth, dtype=dtype)
    weight = noise(37, depth, dtype=dtype, seed=1)
    verify(x, [weight], None, kernels.gemv(x, [weight]))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sizes", [(40, 9), (16, 1, 33)])
def test_several_weights_with_biases(rows: int, sizes: tuple[int, ...]) -> None:
    x = noise(rows, 96, dtype=FP16)
    weights = [noise(n, 96, dtype=FP16, seed=i) for i, n in enumerate(sizes)]
    biases = [noise(n, dtype=FP16, seed=9 + i) for i, n in enumerate(sizes)]
    verify(x, weights, biases, kernels.gemv(x, weights, biases))
    verify(x, weights, None, kernels.gemv(x, weights))


@pytest.mark.parametrize("rows", [1, 4])
def test_lines_with_gaps(rows: int) -> None:
    x = noise(rows, 200, dtype=FP16)[:, :128]
    weight = noise(24, 160, dtype=FP16, seed=1)[:, :128]
    verify(x, [weight], None, kernels.gemv(x, [weight]))


def test_what_is_refused() -> None:
    x = noise(2, 32, dtype=BF16)
    weight = noise(8, 32, dtype=BF16)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: kernels.gemv(noise(9, 32, dtype=BF16), [weight]), "1 to 8 rows"),
        (lambda: kernels.gemv(x.float(), [weight.float()]), "float16 or bfloat16"),
        (lambda: kernels.gemv(x, [weight] * 4), "1 to 3 weights"),
        (lambda: kernels.gemv(x, [weight[:, :16]]), r"expected \[n, 32\]"),
        (lambda: kernels.gemv(x, [weight.half()]), "dtype"),
        (lambda: kernels.gemv(x, [weight], [weight[0]]), r"expected \[8\]"),
        (lambda: kernels.gemv(x, [weight, weight], [weight[:, 0].contiguous()]), "as many biases"),
    ]
    for call, words in refused:
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.skipif(not GPU, reason="launches that begin early are a GPU's")
@pytest.mark.parametrize("rows", [1, 8])
def test_launches_that_begin_early(rows: int) -> None:
    """10,000 replays of a layer's kernels, each launched while the one before runs, have the bits of kernels launched one
    after the other.
    """
    width, inner, layers = 512, 1536, 6
    weights = [
        (
            [noise(width, width, dtype=BF16, seed=10 * i + j) / 23 for j in range(3)],
            [noise(inner, width, dtype=BF16, seed=10 * i + j) / 23 for j in (3, 4)],
            noise(width, inner, dtype=BF16, seed=10 * i + 5) / 39,
        )
        for i in range(layers)
    ]
    scale = noise(width, dtype=BF16, seed=99)
    x = torch.empty(rows, width, dtype=BF16, device=DEVICE)

    def step(pause: Callable[[], None]) -> torch.Tensor:
        total = x
        normed = kernels.rms_norm(total, scale, 1e-6)
        for three, two, last in weights:
            pause()
            q, k, v = kernels.gemv(normed, three).split(width, -1)
            pause()
            mixed = kernels.swiglu(q + k, v)
            pause()
            total, normed = kernels.add_rms_norm(mixed, total, scale, 1e-6)
            pause()
            gate, up = kernels.gemv(normed, two).split(inner, -1)
            pause()
            gated = kernels.swiglu(gate, up)
            pause()
            fed = kernels.gemv(gated, [last])
            pause()
            total, normed = kernels.add_rms_norm(fed, total, scale, 1e-6)
        return normed

    inputs = [noise(rows, width, dtype=BF16, seed=200 + i) for i in range(8)]
    expected = []
    for each in inputs:
        x.copy_(each)
        expected.append(step(torch.cuda.synchronize).clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = step(lambda: None)
    assert_replays(graph, x, answer, list(zip(inputs, expected, strict=True)), 10_000)
