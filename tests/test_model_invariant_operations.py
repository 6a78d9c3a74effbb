"""Operations whose results do not depend on the batch: as exact as torch, in one order; others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged import NotInvariant, batch_invariant


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = numbers(5, 7, 12)


POSITIVE = X.abs() + 0.1


COMPLEX = torch.complex(X, X.flip(0))


def multiplied(x: torch.Tensor) -> torch.Tensor:
    x *= x.conj() + 1
    return x


@torch.library.custom_op("hf_paged_tests::mul", mutates_args=())
def multiply(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """A product with the name of another operation."""
    return one @ two


CASES: dict[str, Callable[[], Any]] = {
    "matmul": lambda: X @ numbers(5, 12, 9),
    "matmul by a matrix": lambda: X @ numbers(12, 9),
    "matmul by a transposed view": lambda: X @ numbers(9, 12).t(),
    "matrix by rows": lambda: numbers(9, 7) @ X,
    "vector": lambda: X @ numbers(12),
    "dot": lambda: X[0, 0] @ numbers(12),
    "addmm": lambda: torch.addmm(numbers(7, 9), X[0], numbers(12, 9), beta=0.5, alpha=2),
    "baddbmm": lambda: torch.baddbmm(numbers(5, 7, 9), X, numbers(5, 12, 9), beta=0.5, alpha=2),
    "baddbmm of nothing": lambda: torch.baddbmm(
        torch.full((5, 7, 9), torch.nan), X, numbers(5, 12, 9), beta=0, alpha=2
    ),
    "addmm of nothing": lambda: torch.addmm(
        torch.full((7, 9), torch.nan), X[0], numbers(12, 9), beta=0, alpha=2
    ),
    "product of counts": lambda: torch.arange(12).view(3, 4) @ torch.arange(8).view(4, 2),
    "sum with a factor": lambda: torch.add(X, POSITIVE, alpha=0.3) - torch.sub(X, X * X, alpha=3),
    "number less a tensor": lambda: 2.5 - X + torch.rsub(X, POSITIVE, alpha=0.7),
    "sum with products": lambda: torch.addcmul(X, X, POSITIVE, value=0.3).addcdiv_(X, POSITIVE, value=-2),
    "lerp": lambda: torch.lerp(X, POSITIVE, 0.3),
    "einsum": lambda: torch.einsum("bld,bmd->blm", X, numbers(5, 3, 12)),
    "linear": lambda: F.linear(X, numbers(9, 12), numbers(9, seed=1)),
    "linear without bias": lambda: F.linear(X, numbers(9, 12)),
    "into a tensor": lambda: torch.mm(X[0], numbers(12, 9), out=torch.empty(7, 9)),
    "sum": lambda: X.sum(),
    "sum of some": lambda: X.sum((0, 2), keepdim=True),
    "sum in doubles": lambda: X.sum(1, dtype=torch.float64),
    "sum of counts": lambda: (X > 0).sum(-1),
    "sum of counts in floats": lambda: (X > 0).sum(-1, dtype=torch.float32),
    "mean": lambda: X.mean(-1, keepdim=True),
    "mean of all": lambda: X.mean(),
    "mean of one number": lambda: X.sum().mean() + X.sum().logsumexp(0) + X[0, 0, 0].softmax(0),
    "var": lambda: X.var(-1),
    "var of a population": lambda: X.var(-1, unbiased=False),
    "var of all": lambda: X.var(unbiased=False),
    "nothing": lambda: F.linear(X[:0], numbers(9, 12)).softmax(-1).sum((0, 1)) + X[:, :0].logsumexp(2).sum(),
    "sum of nothing": lambda: X[:, :0].sum(1) + F.silu(X[:0]).sum(),
    "std": lambda: X.std(1, keepdim=True),
    "sum without NaN": lambda: X.masked_fill(X > 1, torch.nan).nansum(1),
    "mean without NaN": lambda: X.masked_fill(X > 1, torch.nan).nanmean(),
    "norm": lambda: X.norm(dim=-1),
    "norm of order 1": lambda: torch.linalg.vector_norm(X, 1, -1),
    "softmax": lambda: X.softmax(1),
    "softmax to floats": lambda: X.bfloat16().softmax(-1, dtype=torch.float32),
    "softmax in halves": lambda: F.softmax(X.bfloat16(), dim=-1, dtype=torch.bfloat16),
    "log_softmax": lambda: X.log_softmax(0),
    "logsumexp": lambda: X.logsumexp((0, 2)),
    "cross entropy": lambda: F.cross_entropy(X[0], torch.arange(7)),
    "layer norm": lambda: F.layer_norm(X, (12,), numbers(12), numbers(12, seed=1)),
    "layer norm of two": lambda: F.layer_norm(X, (7, 12)),
    "rms norm": lambda: F.rms_norm(X, (12,), numbers(12)),
    "silu": lambda: F.silu(X),
    "silu in place": lambda: F.silu(X.clone(), inplace=True),
    "gelu": lambda: F.gelu(X),
    "gelu by tanh": lambda: F.gelu(X, approximate="tanh"),
    "relu": lambda: F.relu(X),
    "softplus": lambda: F.softplus(X),
    "sigmoid in place": lambda: X.clone().sigmoid_(),
    "exp": lambda: X.exp(),
    "exp of counts": lambda: torch.arange(5).exp(),
    "log": lambda: POSITIVE.log(),
    "sines": lambda: X.sin() + X.cos() + X.tanh() + X.erf(),
    "square": lambda: X**2,
    "cube": lambda: X.pow(3),
    "root": lambda: POSITIVE**-0.5,
    "powers of a number": lambda: 10000.0 ** (torch.arange(0, 12, 2).float() / 12),
    "powers of counts": lambda: torch.arange(1, 12) ** 0.37 + torch.arange(12)[1:] ** torch.tensor(-0.5),
    "powers of counts by counts": lambda: torch.tensor([3, 5]) ** torch.tensor([39, 27]),
    "powers of a count by counts": lambda: 3 ** torch.arange(40),
    "power by a row of one": lambda: torch.tensor(3.0) ** torch.tensor([2.0]),
    "powers of nothing": lambda: torch.ones(0) ** torch.ones(0),
    "squares of counts": lambda: torch.arange(12) ** 2,
    "mean in doubles": lambda: X.mean((0, 2), keepdim=True, dtype=torch.float64),
    "put and added": lambda: X[0].index_put((torch.tensor([1, 1, 3]),), numbers(3, 12), accumulate=True),
    "put": lambda: X[0].clone().index_put_((torch.tensor([1, 3]),), numbers(2, 12)),
    "powers of a tensor": lambda: torch.pow(torch.tensor(0.5), torch.arange(1, 5)),
    "rotary as complex numbers": lambda: torch.view_as_real(
        torch.view_as_complex(X.unflatten(-1, (6, 2))) * torch.polar(torch.ones(7, 6), numbers(7, 6))
    ),
    "complex numbers in place": lambda: torch.view_as_real(multiplied(COMPLEX.clone())),
    "complex numbers into a tensor": lambda: torch.view_as_real(
        torch.mul(COMPLEX, COMPLEX, out=torch.empty(0, dtype=torch.complex64))
    ),
    "squares of complex numbers": lambda: torch.view_as_real(COMPLEX**2 + COMPLEX * (0.3 + 2j)),
    "logsumexp of counts": lambda: torch.arange(12).view(3, 4).logsumexp(1),
    "sum with a factor of a number": lambda: torch.ops.aten.add.Scalar(X, 2, 0.3),
    "matmul by keywords": lambda: (
        torch.matmul(input=X, other=numbers(12, 9)) + X.matmul(other=numbers(12, 9))
    ),
    "attention": lambda: F.scaled_dot_product_attention(*numbers(3, 2, 4, 7, 8), is_causal=True),
    "attention with a mask": lambda: F.scaled_dot_product_attention(
        numbers(2, 4, 7, 8),
        *numbers(2, 2, 2, 9, 8),
        attn_mask=numbers(2, 1, 7, 9),
        scale=0.3,
        enable_gqa=True,
    ),
    "samples": lambda: torch.multinomial(X[0].softmax(-1), 1, generator=torch.Generator().manual_seed(0)),
}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a convolution": (lambda: F.conv1d(X, numbers(4, 7, 3)), "no fixed order for aten.convolution"),
    "a norm": (lambda: torch.linalg.vector_norm(X, 3, -1), "norms of order 1 and 2 only, got 3"),
    "softplus": (lambda: F.softplus(X, beta=2), "beta 1 and threshold 20"),
    "dropout": (
        lambda: F.scaled_dot_product_attention(*numbers(3, 2, 4, 7, 8), dropout_p=0.1),
        "attention dropout of 0.1; set it to zero",
    ),
    "torch.func": (
        lambda: torch.vmap(F.scaled_dot_product_attention)(*numbers(3, 5, 2, 4, 7, 8)),
        "no attention under transforms of torch.func",
    ),
    "sums of complex numbers": (lambda: COMPLEX.sum(-1), "half precision, got torch.complex64"),
    "signs of complex numbers": (lambda: COMPLEX.sgn(), "no fixed order for sgn of torch.complex64"),
    "angles": (lambda: COMPLEX.angle(), "no fixed order for aten.angle"),
    "quotients of complex numbers": (lambda: COMPLEX / COMPLEX, "quotients of complex numbers"),
    "doubles": (lambda: X.double().exp(), "float32 and half precision, got torch.float64"),
    "means of doubles": (lambda: X.double().mean(), "half precision, got torch.float64"),
    "means of complex numbers": (lambda: COMPLEX.mean(), "half precision, got torch.complex64"),
    "deviations of doubles": (lambda: X.double().std(), "half precision, got torch.float64"),
    "norms of doubles": (lambda: torch.linalg.vector_norm(X.double()), "half precision, got torch.float64"),
    "norms in doubles": (
        lambda: torch.linalg.vector_norm(X, dtype=torch.float64),
        "half precision, got torch.float64",
    ),
    "layer norms of doubles": (
        lambda: F.layer_norm(X.double(), (12,)),
        "half precision, got torch.float64",
    ),
    "powers in doubles": (lambda: X ** X.double(), "half precision, got torch.float64"),
    "an operation of another library": (
        lambda: multiply(X[0], numbers(12, 9)),
        "no fixed order for hf_paged_tests.mul",
    ),
    "an operation of another library by name": (
        lambda: torch.ops.hf_paged_tests.mul(X[0], numbers(12, 9)),
        "no fixed order for hf_paged_tests.mul",
    ),
    "products of doubles": (
        lambda: X.double() @ numbers(12, 3).double(),
        "half precision, got torch.float64",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_torchs_answer(case: str) -> None:
    """C44: the mode changes rounding only."""
    right = CASES[case]()
    with batch_invariant():
        found = CASES[case]()
    assert found.dtype == right.dtype
    assert found.shape == right.shape
    assert right.is_floating_point() or torch.equal(found, right)
    assert torch.allclose(found.double(), right.double(), atol=4e-3 if "halves" in case else 3e-5, rtol=3e-5)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    act, message = REFUSED[case]
    with pytest.raises(NotInvariant, match=message), batch_invariant():
        act()


def test_sums_in_doubles_are_as_exact_as_torchs() -> None:
    x = 1e4 * numbers(3, 1000)
    counts = torch.arange(3000) + 2**40

    def work() -> list[torch.Tensor]:
        return [x.sum(-1, dtype=torch.float64), x.mean(dtype=torch.float64), counts.mean(dtype=torch.float64)]

    right = work()
    with batch_invariant():
        found = work()
    for own, torchs in zip(found, right, strict=True):
        torch.testing.assert_close(own, torchs, rtol=1e-12, atol=1e-9)


def test_powers_of_counts_in_all_company() -> None:
    """C44: torch has other code for what does not fill a vector."""
    with batch_invariant():
        whole = torch.arange(1, 100) ** 0.37
        assert all(torch.equal(torch.arange(1, n) ** 0.37, whole[: n - 1]) for n in range(2, 100))


def test_what_a_tensor_cannot_hold() -> None:
    """In place and into a tensor: it raises, as torch does."""
    with batch_invariant():
        with pytest.raises(RuntimeError, match=r"pow_.* got a tensor of torch.int64 to write torch.float32"):
            torch.tensor([4, 9]).pow_(0.5)
        with pytest.raises(RuntimeError, match=r"exp.out got a tensor of torch.int64"):
            torch.exp(X, out=torch.empty(5, 7, 12, dtype=torch.long))


def test_threads_add_in_one_order() -> None:
    """C44: numbers that are added to one place of a tensor."""
    index = torch.randint(0, 8, (8000,), generator=torch.Generator().manual_seed(0))
    added = numbers(8000, 64)
    found = []
    with batch_invariant():
        for threads in (1, 4, 4, 4):
            torch.set_num_threads(threads)
            try:
                found.append(torch.zeros(8, 64).index_put_((index,), added, accumulate=True))
            finally:
                torch.set_num_threads(1)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_rows_that_lie_apart(bias: bool) -> None:
    """C44: torch rounds before it adds the bias there, and after it where rows follow each other."""
    x, w = numbers(4, 3, 300).bfloat16(), numbers(7, 300).bfloat16()
    b = numbers(7).bfloat16() if bias else None
    with batch_invariant():
        whole = F.linear(x, w, b)
        assert torch.equal(F.linear(x[:, -1:], w, b), whole[:, -1:])
        assert torch.equal(F.linear(x.transpose(0, 1), w, bias=b).transpose(0, 1), whole)
        assert torch.equal(F.linear(x[:, :, None].expand(-1, -1, 2, -1), w, b)[:, :, 0], whole)


@pytest.mark.parametrize("product", [F.linear, lambda x, w: torch.matmul(input=x, other=w.t())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_token_of_a_row(dtype: torch.dtype, product: Any) -> None:
    """C44: its dimensions of one have strides of the row's, by which torch chooses among products."""
    x, w = numbers(4, 9, 300).to(dtype), numbers(70, 300).to(dtype)
    with batch_invariant():
        whole = product(x, w)
        assert torch.equal(product(x[2:3, -1:], w), whole[2:3, -1:])
        assert torch.equal(product(x[:, -1:], w), whole[:, -1:])
        assert torch.equal(product(x[:1].transpose(0, 1), w).transpose(0, 1), whole[:1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rsqrt", "sqrt", "reciprocal"])
def test_functions_of_halves(name: str, dtype: torch.dtype) -> None:
    """C44: a CPU rounds numbers that fill no register by other code."""
    x = (numbers(7, 29).abs() + 0.1).to(dtype)
    with batch_invariant():
        whole = getattr(x, name)()
        assert torch.equal(torch.stack([getattr(row, name + "_")() for row in x.clone()]), whole)
        assert torch.equal(torch.stack([getattr(n, name)() for n in x.flatten()]), whole.flatten())
        assert torch.equal(getattr(torch, name)(x.t().contiguous().t(), out=torch.empty_like(x)), whole)


def test_products_of_complex_numbers() -> None:
    """C44: in place, into a tensor, by a number, with a factor: each term is rounded."""
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda z: z * (z + 1),
        lambda z: multiplied(z.clone()),
        lambda z: torch.mul(z, z + 1, out=torch.empty(0, dtype=z.dtype)),
        lambda z: z * (0.3 + 0.7j),
        lambda z: torch.add(z, z + 1, alpha=0.3 + 0.2j),
        lambda z: z**2,
    ]
    z = torch.complex(numbers(9, 29), numbers(9, 29, seed=1))
    for way in ways:
        with batch_invariant():
            assert torch.equal(torch.stack([way(n) for n in z.flatten()]).view_as(z), way(z))


@pytest.mark.parametrize("learns", [False, True])
def test_products_take_one_way(learns: bool) -> None:
    """Torch has two for a matrix and a batch, by how rows lie and whether gradients are wanted; a CUDA device adds
    up otherwise in each.
    """
    x, w = numbers(4, 3, 300), numbers(300, 7).requires_grad_(learns)
    names: list[str] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with batch_invariant(), Products():
        for rows in (x, x[:, -1:], x.transpose(0, 1)):
            names.clear()
            assert torch.equal(rows @ w, torch.matmul(rows, w))
            F.linear(rows, w.t())
            assert (names.count("mm"), names.count("bmm")) == (3, 0)
        names.clear()
        assert torch.equal(w.t() @ x.mT, w.t().matmul(x.mT.contiguous()))
        assert (names.count("mm"), names.count("bmm")) == (0, 2)


def rows() -> list[torch.Tensor]:
    """Prompts of several lengths."""
    return [(numbers(length, seed=length) * 30).long().abs() % 70 + 5 for length in (5, 23, 14)]
