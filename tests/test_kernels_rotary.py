"""Rotary positions against torch's own steps, bit by bit; the cache gets the rotated keys and the values, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, GPU, load

kernels = load()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def noise(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Step:
    """Queries, keys and values of one step as a model has them, and what torch makes of them."""

    def __init__(
        self,
        rows: int,
        new: int,
        query_heads: int,
        heads: int,
        dim: int,
        rotary_dim: int = 0,
        dtype: torch.dtype = FP32,
        one: bool = False,
    ) -> None:
        self.q = noise(rows, new, query_heads, dim, dtype=dtype).transpose(1, 2)
        self.k = noise(rows, new, heads, dim, dtype=dtype, seed=1).transpose(1, 2)
        self.v = noise(rows, new, heads, dim, dtype=dtype, seed=2).transpose(1, 2)
        self.cos, self.sin = (
            noise(1 if one else rows, new, rotary_dim or dim, dtype=dtype, seed=seed) for seed in (3, 4)
        )

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """transformers' apply_rotary_pos_emb of GPT-NeoX, which for full width is Llama's."""
        width = self.cos.shape[2]
        turned, rest = x[..., :width], x[..., width:]
        left, right = turned.chunk(2, -1)
        return torch.cat(
            [turned * self.cos[:, None] + torch.cat([-right, left], -1) * self.sin[:, None], rest], -1
        )

    def verify(self) -> None:
        q, k = kernels.rotary(self.q, self.k, self.cos, self.sin)
        assert_same(q, self.expected(self.q))
        assert_same(k, self.expected(self.k))
        assert q.transpose(1, 2).is_contiguous()
        assert k.transpose(1, 2).is_contiguous()

    def verify_write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        page = keys.shape[1]
        kept = (slots >= 0).nonzero().flatten().to(DEVICE)
        at = slots.to(DEVICE)[kept].long()
        wanted = [keys.clone(), values.clone()]
        for pool, tokens in zip(wanted, (self.expected(self.k), self.v), strict=True):
            pool[at // page, at % page] = tokens.transpose(1, 2).flatten(0, 1)[kept].to(pool.dtype)
        assert_same(
            kernels.rotary_write(self.q, self.k, self.v, self.cos, self.sin, keys, values, slots.to(DEVICE)),
            self.expected(self.q),
        )
        assert_same(keys, wanted[0])
        assert_same(values, wanted[1])


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Every bit; the interpreter cuts off where bfloat16 should be rounded, so there only about."""
    loose = got.dtype == BF16 and not GPU
    torch.testing.assert_close(
        got, expected, rtol=0.02 if loose else 0, atol=0.05 if loose else 0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(("rows", "new", "query_heads", "heads", "dim", "rotary_dim"), [
    (1, 1, 4, 2, 16, 0), (3, 1, 32, 8, 128, 0), (2, 5, 3, 1, 80, 0), (2, 3, 20, 20, 96, 0), (1, 2, 2, 2, 8, 0),
    (2, 3, 3, 3, 80, 20), (2, 1, 4, 2, 96, 72), (1, 2, 2, 1, 8, 2), (3, 1, 2, 1, 256, 64),
])  # fmt: skip
def test_rotary(
    rows: int, new: int, query_heads: int, heads: int, dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    Step(rows, new, query_heads, heads, dim, rotary_dim, dtype).verify()


def test_as_transformers_does_it() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    step = Step(2, 3, 4, 2, 32, dtype=FP16)
    for got, wanted in zip(
        kernels.rotary(step.q, step.k, step.cos, step.sin),
        llama.apply_rotary_pos_emb(step.q, step.k, step.cos, step.sin),
        strict=True,
    ):
        assert_same(got, wanted)


def test_one_cos_for_all_rows() -> None:
    step = Step(3, 2, 4, 2, 16, one=True)
    step.verify()
    step.cos, step.sin = step.cos.expand(3, 2, 16), step.sin.expand(3, 2, 16)
    step.verify()


def test_strided_inputs() -> None:
    """Heads cut out of one product of queries, keys and values; head by head; cos and sin out of wider
    tables.
    """
    step = Step(2, 3, 4, 2, 16)
    wide = torch.full((2, 3, 10, 16), torch.nan, device=DEVICE)
    wide[:, :, :4], wide[:, :, 5:7] = step.q.transpose(1, 2), step.k.transpose(1, 2)
    step.q, step.k = wide[:, :, :4].transpose(1, 2), wide[:, :, 5:7].transpose(1, 2)
    step.cos, step.sin = noise(2, 6, 32, seed=5)[:, ::2, :16], noise(2, 3, 20, seed=6)[..., 4:]
    step.verify()
    step.q, step.k = step.q.contiguous(), step.k.contiguous()
    step.verify()


def cache(blocks: int, page: int, heads: int, dim: int, dtype: torch.dtype, by_head: bool) -> torch.Tensor:
    shape = (blocks, heads, page, dim) if by_head else (blocks, page, heads, dim)
    pool = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    return pool.transpose(1, 2) if by_head else pool


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(("rows", "new", "query_heads", "heads", "dim", "rotary_dim", "page"), [
    (1, 1, 4, 2, 16, 0, 16), (5, 1, 40, 24, 128, 0, 16), (2, 7, 3, 3, 80, 40, 1), (3, 5, 2, 1, 96, 0, 4), (2, 2, 2, 2, 8, 4, 256),
])  # fmt: skip
def test_write(
    rows: int, new: int, query_heads: int, heads: int, dim: int, rotary_dim: int, page: int, by_head: bool
) -> None:
    for dtype in (BF16, FP16, FP32) if GPU else (FP16, FP32):
        step = Step(rows, new, query_heads, heads, dim, rotary_dim, dtype)
        blocks = -(-rows * new // page) + 3
        slots = torch.randperm(blocks * page, generator=torch.Generator().manual_seed(rows))[: rows * new]
        slots[1::3] = -1
        pools = [cache(blocks, page, heads, dim, dtype, by_head) for _ in range(2)]
        step.verify_write(*pools, slots.int() if by_head else slots)


def test_write_values_of_another_width() -> None:
    for width in (24, 200):
        step = Step(2, 3, 4, 2, 16)
        step.v = noise(2, 3, 2, width).transpose(1, 2)
        step.verify_write(
            cache(3, 4, 2, 16, FP32, False),
            cache(3, 4, 2, width, FP32, True),
            torch.tensor([11, 3, -1, 0, 5, 6]),
        )


def test_write_into_a_cache_of_another_dtype() -> None:
    step = Step(2, 1, 4, 2, 16, dtype=FP16)
    with pytest.raises(ValueError, match="must share one"):
        step.verify_write(
            cache(3, 4, 2, 16, FP32, False), cache(3, 4, 2, 16, FP32, False), torch.tensor([2, 7])
        )


def test_write_of_filler_rows_only() -> None:
    step = Step(2, 1, 4, 2, 16)
    step.verify_write(
        cache(1, 4, 2, 16, FP32, False), cache(1, 4, 2, 16, FP32, False), torch.tensor([-1, -1])
    )


def test_no_rows() -> None:
    step = Step(0, 1, 4, 2, 16)
    step.verify()
    step.verify_write(
        cache(1, 4, 2, 16, FP32, False), cache(1, 4, 2, 16, FP32, False), torch.empty(0, dtype=torch.long)
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "q": (lambda x: {"q": x["q"][0]}, "Invalid shape of q: expected"),
    "q's strides": (lambda x: {"q": x["q"].transpose(2, 3)}, "Invalid shape of q: expected"),
    "k": (
        lambda x: {"k": x["k"][..., :8]},
        r"Invalid shape of k: expected \[2, heads, 3, 16\] .*, got \[2, 2, 3, 8\]",
    ),
    "cos": (lambda x: {"cos": x["cos"][:, :2]}, r"Invalid shape of cos: expected .*, got \[2, 2, 16\]"),
    "odd cos": (lambda x: {"cos": x["cos"][..., :7], "sin": x["sin"][..., :7]}, "Invalid shape of cos"),
    "sin": (
        lambda x: {"sin": x["sin"][..., :8]},
        r"Invalid shape of sin: expected \[2, 3, 16\], got \[2, 3, 8\]",
    ),
    "dtypes": (lambda x: {"cos": x["cos"].half()}, "Invalid dtypes: q, k, cos and sin must share one"),
    "v": (lambda x: {"v": x["v"][:, :1]}, r"Invalid shape of v: expected \[2, 2, 3, value_dim\]"),
    "keys": (
        lambda x: {"keys": x["keys"][:, :, :1]},
        r"Invalid shape of keys: expected \[4, 4, 2, 16\] .*, got \[4, 4, 1, 16\]",
    ),
    "values": (
        lambda x: {"values": x["values"][:3]},
        r"Invalid shape of values: expected \[4, 4, 2, 16\] .*, got \[3, 4, 2, 16\]",
    ),
    "slots": (lambda x: {"slots": x["slots"][:2]}, r"Invalid shape of slots: expected \[6\], got \[2\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_does_not_fit(name: str) -> None:
    arguments = vars(Step(2, 3, 4, 2, 16))
    pools = {"keys": cache(4, 4, 2, 16, FP32, False), "values": cache(4, 4, 2, 16, FP32, False)}
    arguments |= {**pools, "slots": torch.zeros(6, dtype=torch.long, device=DEVICE)}
    wrong, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        kernels.rotary_write(**{**arguments, **wrong(arguments)})


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_matrix(dim: int, dtype: torch.dtype) -> None:
    for rows, new, one in ((1, 1, False), (256, 1, False), (3, 40, True)):
        step = Step(rows, new, 32, 8, dim, dtype=dtype, one=one)
        step.verify()
        slots = torch.randperm(rows * new + 32)[: rows * new]
        step.verify_write(
            *(cache(-(-rows * new // 16) + 2, 16, 8, dim, dtype, True) for _ in range(2)), slots
        )


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_slots_past_two_to_the_31() -> None:
    blocks = 2**31 // (16 * 8 * 128) + 2
    pool = torch.zeros(blocks, 16, 8, 128, dtype=BF16, device=DEVICE)
    step = Step(2, 1, 32, 8, 128, dtype=BF16)
    kernels.rotary_write(
        step.q,
        step.k,
        step.v,
        step.cos,
        step.sin,
        pool,
        pool.clone(),
        torch.tensor([blocks * 16 - 1, 5], device=DEVICE),
    )
    assert torch.equal(pool[-1, -1], step.expected(step.k)[0, :, 0])
    assert torch.equal(pool[0, 5], step.expected(step.k)[1, :, 0])
    assert pool[-2:].count_nonzero() <= 8 * 128
