"""The batch-invariant functions of CPUs: right, and the same bits of a row in all company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import examples
from functions import FUNCTIONS, OF_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_paged_native as native

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler to build it with")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(scope="module")
def kernels(native_folder: Path) -> native.InvariantFunctions:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(native_folder))
        return native.InvariantFunctions(native.load(native.build()))


@pytest.fixture
def threads() -> Iterator[None]:
    """Two threads of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- products


@given(
    st.integers(1, 70), st.integers(1, 80), st.integers(1, 140), st.sampled_from(DTYPES), st.booleans(),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=examples(20))
def test_a_row_of_a_product(
    kernels: native.InvariantFunctions,
    rows: int,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    lanes: bool,
    add: bool,
) -> None:
    """A row alone has the bits that it has among others, and the product is right."""
    x = numbers(2, rows, depth, dtype=dtype)
    w = (
        numbers(2, columns, depth, dtype=dtype, seed=1).mT
        if lanes
        else numbers(2, depth, columns, dtype=dtype)
    )
    bias = numbers(columns, dtype=dtype, seed=2) if add else None
    found = kernels.product(x, w, bias, lanes=lanes)
    right = x.double() @ w.double() + (0 if bias is None else bias.double())
    assert (found.double() - right).abs().max() <= ROUNDING[dtype] * (right.abs().max() + depth**0.5)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(kernels.product(x[:, row : row + 1], w, bias, lanes=lanes)[:, 0], found[:, row])


def test_zeros_change_no_bit_of_a_product(kernels: native.InvariantFunctions) -> None:
    """Masked tokens, whose weights are zero, may stand anywhere among the others."""
    x = numbers(1, 5, 20)
    w = numbers(1, 20, 30, seed=1)
    found = kernels.product(x, w, lanes=False)
    more = torch.cat([x.new_zeros(1, 5, 7), x[..., :9], x.new_zeros(1, 5, 2), x[..., 9:]], -1)
    beside = torch.cat([w[:, :7], w[:, :9], w[:, :2], w[:, 9:]], 1)
    assert torch.equal(kernels.product(more, beside, lanes=False), found)


def test_strided_products(kernels: native.InvariantFunctions) -> None:
    x = numbers(3, 40, 9).permute(2, 0, 1)
    w = numbers(40, 9, 6, seed=1).permute(1, 0, 2)
    for lanes in (True, False):
        assert torch.allclose(kernels.product(x, w, lanes=lanes), x @ w, atol=1e-5)


def test_products_of_other_shapes_are_refused(kernels: native.InvariantFunctions) -> None:
    with pytest.raises(ValueError, match=r"expected \[2, 5, columns\], got \[2, 4, 3\]"):
        kernels.product(numbers(2, 3, 5), numbers(2, 4, 3), lanes=True)


# ---- attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_of_a_query(
    kernels: native.InvariantFunctions, threads: None, dtype: torch.dtype, softcap: float | None
) -> None:
    """A query alone over what it sees has the bits that it has in a causal prompt; grouped heads, sinks, and
    values of another width.
    """
    query = numbers(2, 6, 19, 24, dtype=dtype)
    keys = numbers(2, 3, 19, 24, dtype=dtype, seed=1)
    values = numbers(2, 3, 19, 20, dtype=dtype, seed=2)
    sinks = numbers(6, seed=3)
    found = kernels.attend(query, keys, values, causal=True, softcap=softcap, sinks=sinks)
    scores = query.double() @ keys.double().repeat_interleave(2, 1).mT / 24**0.5
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(torch.ones(19, 19).triu(1).bool(), -torch.inf)
    scores = torch.cat([scores, sinks.double().view(1, 6, 1, 1).expand(2, 6, 19, 1)], -1)
    right = scores.softmax(-1)[..., :-1] @ values.double().repeat_interleave(2, 1)
    assert (found.double() - right).abs().max() <= 3 * ROUNDING[dtype]
    for token in range(19):
        own = slice(token, token + 1)
        alone = kernels.attend(
            query[:, :, own], keys[:, :, : token + 1], values[:, :, : token + 1], softcap=softcap, sinks=sinks
        )
        assert torch.equal(alone[:, :, 0], found[:, :, token])


@pytest.mark.parametrize("added", [False, True])
def test_masked_tokens_take_no_part(kernels: native.InvariantFunctions, added: bool) -> None:
    """Padding changes no bit, wherever it stands and whatever it holds; a query that sees nothing gives 0."""
    query = numbers(1, 4, 5, 16)
    keys = numbers(1, 2, 11, 16, seed=1)
    values = numbers(1, 2, 11, 16, seed=2)
    found = kernels.attend(query, keys, values)
    unknown = torch.full((1, 2, 6, 16), 1e30 if added else torch.nan)
    seen = torch.tensor([False] * 3 + [True] * 4 + [False] * 3 + [True] * 7)
    mask = seen.expand(1, 1, 5, 17).clone()
    mask[0, 0, 4] = False
    spread = [
        torch.cat([unknown[:, :, :3], x[:, :, :4], unknown[:, :, 3:], x[:, :, 4:]], 2) for x in (keys, values)
    ]
    bias = torch.zeros(1, 1, 5, 17).masked_fill(~mask, -torch.inf)
    padded = kernels.attend(query, *spread, bias if added else mask)
    assert torch.equal(padded[:, :, :4], found[:, :, :4])
    assert not padded[:, :, 4].any()


# ---- rows and numbers


@pytest.mark.parametrize("kind", ["sum", "softmax", "log_softmax", "logsumexp"])
def test_a_row_of_a_sum(kernels: native.InvariantFunctions, threads: None, kind: str) -> None:
    x = 3 * numbers(37, 1001)
    found = kernels.rows(kind, x)
    right = getattr(torch, kind)(x.double(), -1)
    assert (found.double() - right).abs().max() < 1e-4
    assert torch.equal(kernels.rows(kind, x[5:6])[0], found[5])


def test_softmax_with_masked_tokens_before(kernels: native.InvariantFunctions) -> None:
    x = numbers(3, 21)
    masked = torch.cat([torch.full((3, 4), -torch.inf), x], 1)
    assert torch.equal(kernels.rows("softmax", masked)[:, 4:], kernels.rows("softmax", x))
    nothing = kernels.rows("logsumexp", torch.full((1, 3), -torch.inf))
    assert nothing.item() == -torch.inf


def test_log_softmax_is_the_number_less_the_logsumexp(kernels: native.InvariantFunctions) -> None:
    """Trainers compute log-probabilities in both ways, and both have the same bits."""
    x = numbers(64, 1000)
    assert torch.equal(kernels.rows("log_softmax", x), x - kernels.rows("logsumexp", x)[:, None])


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions_of_one_number(kernels: native.InvariantFunctions, threads: None, kind: str) -> None:
    """Right to some units of the last place, also where numbers are huge, and the same at every place."""
    x = torch.cat([4 * numbers(2000), torch.tensor([0.0, 1e-30, 87.5, 500.0, -500.0])])
    x = x.abs() if kind in OF_SIZES else x
    found = kernels.mapped(kind, x, 1.7)
    right = FUNCTIONS[kind](x.double()).float()
    assert torch.allclose(found, right, rtol=2e-6, atol=3e-6)
    for begin in (1, 7, 600):
        assert torch.equal(kernels.mapped(kind, x[begin:], 1.7), found[begin:])
    assert kernels.mapped(kind, torch.tensor([torch.nan]), 1.7).isnan()


def test_nothing_to_compute(kernels: native.InvariantFunctions) -> None:
    assert kernels.product(numbers(1, 0, 4), numbers(1, 4, 3), lanes=True).shape == (1, 0, 3)
    assert kernels.attend(numbers(1, 2, 0, 8), numbers(1, 2, 5, 8), numbers(1, 2, 5, 8)).shape == (1, 2, 0, 8)
    assert kernels.rows("sum", numbers(0, 4)).shape == (0,)
    assert kernels.mapped("exp", numbers(0)).shape == (0,)
