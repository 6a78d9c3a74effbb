"""Products of experts against a loop over the pairs."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, GPU, load
from torch.nn.functional import gelu, silu

kernels = load()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [FP32, FP16, *([BF16] if GPU else [])]  # the interpreter multiplies no bfloat16
CLOSE = {FP32: (1e-5, 1e-5), FP16: (4e-3, 4e-3), BF16: (3e-2, 3e-2)}
ACTIVATIONS = {"silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}


def noise(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def choices(rows: int, top: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Different experts for each row."""
    chance = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=chance)[:top] for _ in range(rows)]).to(DEVICE)


@pytest.mark.parametrize(
    ("rows", "top", "experts"), [(1, 1, 1), (1, 4, 8), (7, 2, 3), (40, 8, 128), (700, 4, 6)]
)
def test_pairs_are_ordered_by_expert(rows: int, top: int, experts: int) -> None:
    chosen = choices(rows, top, experts)
    routes = kernels.route(chosen, experts)
    flat = chosen.flatten()
    assert torch.equal(routes.order.long(), torch.sort(flat, stable=True).indices)
    counts = torch.bincount(flat, minlength=experts)
    used = counts.nonzero().flatten()
    own, begin, count = routes.records.long().T
    assert torch.equal(own[: len(used)], used)
    assert torch.equal(count[: len(used)], counts[used])
    assert torch.equal(begin[: len(used)], counts.cumsum(0)[used] - counts[used])
    assert not count[len(used) :].any()
    assert sorted(own.tolist()) == list(range(experts))


def reference(
    x: torch.Tensor, w: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    found = []
    for i, expert in enumerate(chosen.flatten().tolist()):
        y = (x[i // chosen.shape[1]].float() @ w[expert].float()).to(x.dtype)
        if bias is not None:
            y = y + bias[expert]
        if activation is not None:
            gate, up = y.chunk(2)
            y = ACTIVATIONS[activation](gate.float()).to(x.dtype) * up
        found.append(y)
    return torch.stack(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 9])
def test_products(dtype: torch.dtype, activation: str | None, rows: int) -> None:
    """Weights of either layout, with and without biases; those of experts that nobody chose are NaN."""
    top, experts, depth, columns = 3, 5, 72, 88
    chosen = choices(rows, top, experts)
    x = noise(rows, depth, dtype=dtype)
    unused = [each for each in range(experts) if each not in chosen.flatten().tolist()]
    for flipped in (False, True):
        w = noise(experts, depth, columns, dtype=dtype, seed=1) / 8
        w[unused] = torch.nan
        w = w.transpose(1, 2).contiguous().transpose(1, 2) if flipped else w
        bias = noise(experts, columns, dtype=dtype, seed=2) if flipped else None
        routes = kernels.route(chosen, experts)
        got = kernels.expert_product(x, w, routes, bias, activation=activation)
        rtol, atol = CLOSE[dtype]
        torch.testing.assert_close(got, reference(x, w, chosen, bias, activation), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES[::2])
def test_all_rows_of_one_expert(dtype: torch.dtype) -> None:
    """More tiles of rows than programs that share them."""
    x, w = noise(150, 64, dtype=dtype), noise(2, 64, 32, dtype=dtype, seed=1) / 8
    chosen = torch.ones(150, 1, dtype=torch.long, device=DEVICE)
    got = kernels.expert_product(x, w, kernels.route(chosen, 2))
    rtol, atol = CLOSE[dtype]
    torch.testing.assert_close(got, reference(x, w, chosen, None, None), rtol=rtol, atol=atol)


def test_rows_of_pairs_and_their_sum() -> None:
    """The second product reads a row for each pair; a number that is no expert's adds nothing."""
    rows, top, experts = 6, 2, 4
    chosen = choices(rows, top, experts)
    chosen[2, 1] = experts
    routes = kernels.route(chosen, experts)
    x, w = noise(rows * top, 32), noise(experts, 32, 48, seed=1) / 6
    y = kernels.expert_product(x, w, routes, by_pair=True)
    weights = noise(rows, top, seed=2).abs()
    got = kernels.expert_sum(y, weights, chosen, experts)
    expected = torch.zeros(rows, 48, device=DEVICE)
    for i, expert in enumerate(chosen.flatten().tolist()):
        if expert < experts:
            expected[i // top] += (x[i] @ w[expert]) * weights.flatten()[i]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [FP16, FP32])
def test_sums_round_as_torch_does(weights: torch.dtype) -> None:
    """Products in the wider type of the two, sums in float32."""
    y, by = noise(12, 40, dtype=FP16), noise(4, 3, dtype=weights, seed=1)
    chosen = torch.zeros(4, 3, dtype=torch.long, device=DEVICE)
    expected = (y.view(4, 3, 40) * by[..., None]).float().sum(1).to(FP16)
    torch.testing.assert_close(kernels.expert_sum(y, by, chosen, 1), expected, rtol=1e-3, atol=1e-3)


def test_errors_say_what_was_expected() -> None:
    routes = kernels.route(torch.zeros(2, 1, dtype=torch.long, device=DEVICE), 2)
    with pytest.raises(ValueError, match=r"expected \[rows, top\]"):
        kernels.route(torch.zeros(2, dtype=torch.long, device=DEVICE), 2)
    with pytest.raises(ValueError, match=r"expected \[experts, 8, columns\]"):
        kernels.expert_product(noise(2, 8), noise(2, 4, 4), routes)
    with pytest.raises(ValueError, match="expected one of silu, gelu_tanh"):
        kernels.expert_product(noise(2, 8), noise(2, 8, 4), routes, activation="relu")
    with pytest.raises(ValueError, match="Invalid shape of bias"):
        kernels.expert_product(noise(2, 8), noise(2, 8, 4), routes, noise(2, 3))
    with pytest.raises(ValueError, match=r"expected \[2, columns\]"):
        kernels.expert_sum(noise(3, 4), noise(2, 1), torch.zeros(2, 1, dtype=torch.long, device=DEVICE), 2)
