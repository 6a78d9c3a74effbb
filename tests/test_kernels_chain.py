"""Chains of operations in one kernel: every operation as torch computes and rounds it, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chain_functions import FUNCTIONS, PARTS
from kernel_cases import DEVICE, GPU, load

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
kernels = load()
Operation = kernels.Operation
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter cuts off where bfloat16 should be rounded.
ERROR = {FP32: 2e-6, FP16: 2e-3, BF16: 1.6e-2 if GPU else 3.2e-2}


def noise(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def run(inputs: list[torch.Tensor], *operations: Any) -> torch.Tensor:
    """The answer of the last operation."""
    out = torch.empty(inputs[0].shape, dtype=operations[-1].dtype, device=DEVICE)
    kernels.chain(inputs, operations, {len(inputs) + len(operations) - 1: out})
    return out


def test_all_operations_are_compared() -> None:
    assert set(FUNCTIONS) == set(kernels.FUNCTIONS)
    assert set(PARTS) == set(kernels.PARTS)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_operations_are_torchs(kind: str) -> None:
    """In every type, on zeros, large numbers, infinities and NaN too; sums along lines of 40."""
    for dtype in (FP32, FP16, BF16):
        x = noise(6, 40, dtype=dtype) * 3
        if kind in ("sqrt", "rsqrt"):
            x = x.abs()
        if kind not in kernels.SUMS:
            x[0, :6] = torch.tensor([0.0, 30.0, -30.0, float("inf"), -float("inf"), float("nan")])
        if kind == "gelu" and not GPU:
            x[0, 3] = 1.0  # torch's answer to infinity is NaN on CPUs
        operands: tuple[Any, ...] = (0, 1) if kind in ("add", "sub", "mul", "div") else (0,)
        operands = (0, 0.5) if kind.startswith("at_") else operands
        operands = (0, -0.5, 0.25) if kind == "clamp" else operands
        y = noise(6, 40, dtype=dtype, seed=1)
        wanted = FUNCTIONS[kind](*((x, y)[i] if isinstance(i, int) else i for i in operands)).expand(6, 40)
        got = run([x, y], Operation(kind, operands, dtype))
        if GPU and kind not in kernels.SUMS and kind not in ("gelu", "gelu_tanh"):
            assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0)), dtype
        torch.testing.assert_close(got, wanted, rtol=ERROR[dtype], atol=ERROR[dtype], equal_nan=True)


def test_each_step_is_rounded_to_its_type() -> None:
    """A sum in bf16 loses what fp32 keeps, and a value that is asked for is what later ones read."""
    x = torch.full((2, 8), 256.0, device=DEVICE, dtype=BF16)
    y = torch.full((2, 8), 0.5, device=DEVICE, dtype=BF16)
    total, back = torch.empty_like(x), torch.empty_like(x)
    steps = [Operation("add", (0, 1), BF16), Operation("sub", (2, 0), BF16)]
    kernels.chain([x, y], steps, {2: total, 3: back})
    assert total.unique().tolist() == [256.0]
    assert back.unique().tolist() == [0.0]
    wide = torch.empty(2, 8, device=DEVICE)
    kernels.chain([x, y], [steps[0]._replace(dtype=FP32), steps[1]._replace(dtype=FP32)], {3: wide})
    assert wide.unique().tolist() == [0.5]


LAYOUTS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "one line": lambda: [noise(70), noise(70, seed=1)],
    "lines of a product of several": lambda: [noise(5, 1, 48)[..., :20], noise(5, 1, 20, seed=1)],
    "a weight for all lines": lambda: [noise(3, 2, 20), noise(20, seed=1).expand(3, 2, 20)],
    "a number for each line": lambda: [noise(3, 2, 20), noise(3, 2, 1, seed=1).expand(3, 2, 20)],
    "transposed": lambda: [noise(3, 20, 4).transpose(1, 2), noise(3, 4, 20, seed=1)],
    "four dimensions": lambda: [noise(2, 3, 4, 10).transpose(1, 2), noise(2, 1, 3, 10, seed=1).expand(2, 4, 3, 10)],
    "one number": lambda: [noise(1), noise(1, seed=1)],
    "more than a tile": lambda: [noise(2, 3000), noise(2, 3000, seed=1)],
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    x, y = LAYOUTS[name]()
    pair = [Operation("mul", (0, 1), FP32), Operation("add", (2, 1.5), FP32)]
    wanted = x * y + 1.5
    got = torch.full_like(wanted, float("nan"))
    kernels.chain([x, y], pair, {3: got})
    assert torch.equal(got, wanted)
    norm = [Operation("square", (0,), FP32), Operation("mean", (2,), FP32), Operation("div", (1, 3), FP32)]
    got = run([x, y], *norm)
    torch.testing.assert_close(got, y / x.square().mean(-1, keepdim=True), rtol=1e-5, atol=1e-6)


def _turned(x: int, cos: int, sin: int, first: int, dim: int, dtype: torch.dtype) -> list[Any]:
    """x * cos + rotate_half(x) * sin of lines of `dim`; first: the place of the first operation."""
    half = dim / 2
    return [
        Operation("slice", (x, half, float(dim), 1.0), dtype),
        Operation("neg", (first,), dtype),
        Operation("slice", (x, 0.0, half, 1.0), dtype),
        Operation("cat", (first + 1, first + 2, half), dtype),
        Operation("mul", (first + 3, sin), dtype),
        Operation("mul", (x, cos), dtype),
        Operation("add", (first + 5, first + 4), dtype),
    ]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rotary", [12, 8])
def test_lines_put_together(rotary: int, dtype: torch.dtype) -> None:
    """Rotary positions of a norm's answer, of all its columns and of some."""
    x, weight = noise(3, 2, 1, 12, dtype=dtype).transpose(1, 2), noise(12, seed=1, dtype=dtype)
    cos, sin = noise(3, 1, 1, rotary, dtype=dtype, seed=2), noise(3, 1, 1, rotary, dtype=dtype, seed=3)
    inputs = [x, *(each.expand(*x.shape[:3], -1) for each in (weight, cos, sin))]
    steps = [
        Operation("square", (0,), FP32),
        Operation("mean", (4,), FP32),
        Operation("div", (0, 5), dtype),
        Operation("mul", (6, 1), dtype),
        Operation("slice", (7, 0.0, float(rotary), 1.0), dtype),
        *_turned(8, 2, 3, 9, rotary, dtype),
        Operation("slice", (7, float(rotary), 12.0, 1.0), dtype),
        Operation("cat", (15, 16, float(rotary)), dtype),
    ]
    steps = steps if rotary < 12 else steps[:-2]
    normed = (x.float() / x.float().square().mean(-1, keepdim=True)).to(dtype) * weight
    left, right = normed[..., : rotary // 2], normed[..., rotary // 2 : rotary]
    turned = normed[..., :rotary] * cos + torch.cat([-right, left], -1) * sin
    wanted = torch.cat([turned, normed[..., rotary:]], -1)
    torch.testing.assert_close(run(inputs, *steps), wanted, rtol=ERROR[dtype], atol=ERROR[dtype])


def test_pairs_of_columns() -> None:
    """Every other column, two values by turns, and a number of each line beside them."""
    x, y = noise(4, 10), noise(4, 1, seed=1)
    steps = [
        Operation("slice", (0, 1.0, 10.0, 2.0), FP32),
        Operation("neg", (2,), FP32),
        Operation("slice", (0, 0.0, 10.0, 2.0), FP32),
        Operation("interleave", (3, 4), FP32),
        Operation("add", (5, 1), FP32),
    ]
    wanted = torch.stack([-x[:, 1::2], x[:, ::2]], -1).flatten(-2) + y
    assert torch.equal(run([x, y], *steps), wanted)
    three = [Operation("neg", (0,), FP32), Operation("cat", (0, 1, 0, 10.0, 20.0), FP32)]
    out = torch.empty(4, 30, device=DEVICE)
    kernels.chain([x], three, {2: out})
    assert torch.equal(out, torch.cat([x, -x, x], -1))


def test_answers_may_lie_in_any_order() -> None:
    x = noise(3, 4, 5)
    out = torch.empty(5, 4, 3, device=DEVICE).permute(2, 1, 0)
    kernels.chain([x], [Operation("exp", (0,), FP32)], {1: out})
    torch.testing.assert_close(out, x.exp(), rtol=ERROR[FP32], atol=0)


def test_nothing_to_compute() -> None:
    out = torch.empty(0, 4, device=DEVICE)
    kernels.chain([torch.empty(0, 4, device=DEVICE)], [Operation("exp", (0,), FP32)], {1: out})
    assert out.shape == (0, 4)


def test_refused() -> None:
    x, out = noise(2, 8), torch.empty(2, 8, device=DEVICE)
    double = [Operation("neg", (0,), FP32)]
    with pytest.raises(ValueError, match=r"expected \[2, 8\] in one of .*got \[\(\[8\], torch.float32\)\]"):
        kernels.chain([noise(8)], double, {1: out})
    with pytest.raises(ValueError, match=r"torch\.float64"):
        kernels.chain([x.double()], double, {1: out})
    with pytest.raises(ValueError, match="no input"):
        kernels.chain([], double, {0: out})
    wide = torch.empty(1, 20000, device=DEVICE)
    parts = [Operation("cat", (0, 0, 8.0), FP32)]
    with pytest.raises(ValueError, match=r"expected \[2, 16\].*got \[\(\[3, 8\]"):
        kernels.chain([noise(3, 8)], parts, {1: torch.empty(2, 16, device=DEVICE)})
    with pytest.raises(ValueError, match=r"lines of 1 to 16384, got \[1, 20000\]"):
        kernels.chain([wide], [Operation("sum", (0,), FP32)], {1: torch.empty_like(wide)})
