"""Chains: operations that are computed together, with the numbers of each alone, whatever the code is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from captures import counts
from fused_models import Kernels, captured_steps
from releases import NEEDS_SLOTS
from tiny import build, config_class
from torch.nn import functional as F

from hf_paged.model.capture.chains import LEAST, MOST, Chains, Noted, computed
from hf_paged.model.capture.fusion import Fusion, fused
from hf_paged.model.lazy import NotCapturable
from hf_paged.model.rehearsal import Rehearsal

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def noise(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gates(dtype: torch.dtype) -> torch.Tensor:
    """Qwen3.5's decay."""
    a, log, bias = noise(3, 1, 40, dtype=dtype)[..., :8], noise(8, dtype=dtype), noise(8, seed=1).to(dtype)
    return -log.float().exp() * F.softplus(a.float() + bias)


def gated_norm(dtype: torch.dtype) -> torch.Tensor:
    x, gate, weight = noise(6, 16, dtype=dtype), noise(6, 20, dtype=dtype)[:, :16], noise(16, dtype=dtype)
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    h = weight * h.to(dtype)
    return (h * F.silu(gate.to(torch.float32))).to(dtype)


def softmax_by_hand(dtype: torch.dtype) -> torch.Tensor:
    x = noise(2, 3, 7, dtype=dtype).float()
    e = (x - 2.0).exp()
    return (e / e.sum(-1, keepdim=True)).to(dtype)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Numbers on both sides, whole ones, and a clamp."""
    x = noise(2, 5, dtype=dtype)
    return (2 - x.clamp(min=-0.5) * 3) / 4 + (x.tanh() - 1).neg()


def transposed(dtype: torch.dtype) -> torch.Tensor:
    x = noise(2, 3, 4, dtype=dtype).transpose(0, 1)
    return x.sigmoid() * x + x


def cast_where_it_is(dtype: torch.dtype) -> torch.Tensor:
    x = noise(2, 3, dtype=dtype).sigmoid()
    return x.to(dtype=torch.float16, device=x.device) * 3.0


def _positions(dtype: torch.dtype, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return noise(2, 1, 1, dim, dtype=dtype, seed=2), noise(2, 1, 1, dim, dtype=dtype, seed=3)


def turned(dtype: torch.dtype) -> torch.Tensor:
    """Rotary positions of a norm's answer, as OLMo has them."""
    x, weight, (cos, sin) = noise(2, 3, 1, 8, dtype=dtype), noise(8, dtype=dtype), _positions(dtype, 8)
    h = x.float()
    h = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    return h * cos + torch.cat((-h[..., 4:], h[..., :4]), dim=-1) * sin


def turned_in_part(dtype: torch.dtype) -> torch.Tensor:
    """Phi-3's: some of the columns pass, or none."""
    x, (cos, sin) = noise(2, 3, 1, 8, dtype=dtype), _positions(dtype, 6)
    rot, passed = x[..., :6], x[..., 6:]
    rotated = rot * cos + torch.cat((-rot[..., 3:], rot[..., :3]), dim=-1) * sin
    return torch.cat([torch.cat([rotated, passed], dim=-1), x[..., 8:]], dim=-1)


def turned_in_pairs(dtype: torch.dtype) -> torch.Tensor:
    """GLM-4's."""
    x, (cos, sin) = noise(2, 3, 1, 8, dtype=dtype), _positions(dtype, 3)
    cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    rot, passed = x[..., :6], x[..., 6:]
    pairs = torch.stack((-rot[..., 1::2], rot[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat([rot * cos + pairs * sin, passed], dim=-1)


def turned_in_halves(dtype: torch.dtype) -> torch.Tensor:
    """gpt-oss's."""
    x, (cos, sin) = noise(2, 3, 1, 8, dtype=dtype), _positions(dtype, 4)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def powers(dtype: torch.dtype) -> torch.Tensor:
    x = noise(3, 8, dtype=dtype).abs() + 1.0
    return (torch.pow(x, -0.5) * x.pow(0.5)).clamp(0.25, 0.75)


PIECES = {
    each.__name__: each
    for each in (
        cast_where_it_is,
        gates,
        gated_norm,
        softmax_by_hand,
        numbers,
        powers,
        transposed,
        turned,
        turned_in_halves,
        turned_in_pairs,
        turned_in_part,
    )
}


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", PIECES)
def test_one_launch_and_the_same_bits(name: str, dtype: torch.dtype) -> None:
    expected = PIECES[name](dtype)
    kernels = Kernels()
    with Chains(kernels):
        found = PIECES[name](dtype)
        assert isinstance(found, Noted)
        assert kernels.calls.total() == 0
        got = found.dense()
    assert torch.equal(got, expected)
    assert (got.dtype, got.stride()) == (expected.dtype, expected.stride())
    assert kernels.calls == {"chain": 1}


def test_an_operation_alone_is_torchs_own() -> None:
    x = noise(4)
    kernels = Kernels()
    with Chains(kernels):
        assert torch.equal(computed(x.exp()), x.exp())
        assert torch.equal(computed(x.cos() * 1.0), x.cos())  # a product with one is none
    assert LEAST == 2
    assert not kernels.calls


def test_what_is_asked_for_twice_is_computed_once() -> None:
    """A sum that a later one reads too comes out of the same launch."""
    x, kernels = noise(4), Kernels()
    with Chains(kernels):
        total = x.sigmoid() + x
        scaled = total.exp() * 2.0
        assert torch.equal(scaled.dense(), (x.sigmoid() + x).dense().exp().dense() * 2.0)
        before = kernels.calls["chain"]
        assert torch.equal(total.dense(), x.sigmoid().dense() + x)
        assert kernels.calls["chain"] == before


def test_more_than_a_kernel_takes() -> None:
    x, kernels = noise(4), Kernels()

    def many() -> torch.Tensor:
        y = x
        for i in range(2 * MOST):
            y = y * 0.5 + float(i)
        return y

    expected = many()
    with Chains(kernels):
        assert torch.equal(computed(many()), expected)
    assert kernels.calls["chain"] > 1


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number": lambda x: x.add_(1),
    "a part": lambda x: x[:2].zero_(),
    "a copy": lambda x: x.copy_(torch.zeros(4)),
    "an index": lambda x: x.index_fill_(0, torch.tensor([1]), 9.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_overwritten_was_read_before(name: str) -> None:
    x = noise(4)
    expected = x.sigmoid() * x
    with Chains(Kernels()):
        found = x.sigmoid() * x
        CHANGES[name](x)
        assert torch.equal(computed(found), expected)


def test_a_noted_answer_may_be_changed_in_place() -> None:
    x = noise(4)
    with Chains(Kernels()):
        found = x.sigmoid() * x
        later = found.exp() + 1.0
        found += 1
        assert torch.equal(computed(found), torch.sigmoid(x).mul(x).add(1))
        assert torch.equal(computed(later), torch.sigmoid(x).mul(x).exp().add(1))


def test_operations_in_place_join_a_chain() -> None:
    """Notes of the tensor from before keep their numbers."""
    x, kernels = noise(4), Kernels()
    product = x.sigmoid() * x
    with Chains(kernels):
        found = x.sigmoid() * x
        before = found + 1.0
        found /= before
        found *= 2.0
        assert kernels.calls.total() == 0
        got = computed(found)
        assert kernels.calls == {"chain": 1}
        sum_before = computed(before)
    assert torch.equal(got, product / (product + 1) * 2)
    assert torch.equal(sum_before, product + 1)


def test_a_view_sees_what_is_written_later() -> None:
    """Of a tensor whose content the forward has seen, and into a narrower type."""
    x = noise(4)
    with Chains(Kernels()):
        found = x.sigmoid() * x
        view = found.view(2, 2)
        found *= 2.0
        assert torch.equal(view.view(4), computed(found))
        half = (x.sigmoid() * x).to(BF16)
        half.mul_(x)
        assert half.dtype == BF16
        assert torch.equal(computed(half), (x.sigmoid() * x).to(BF16).mul_(x))


OVER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: x[..., 1:],
    "every other column": lambda x: x[..., ::2],
    "columns of columns": lambda x: x[..., 1:][..., 1:],
}


@pytest.mark.parametrize("name", OVER)
@pytest.mark.parametrize("read", ["", "view", "base"])
@pytest.mark.parametrize("written", ["base", "view"])
def test_columns_are_views(name: str, read: str, written: str) -> None:
    """A change of a tensor or of some of its columns is seen in both, read before or not."""

    def change() -> tuple[torch.Tensor, torch.Tensor]:
        base = noise(3, 6).sigmoid() * 2.0
        view = OVER[name](base)
        total = view.exp() + 1.0
        if read:
            assert computed({"base": base, "view": view}[read]).isfinite().all()
        ({"base": base, "view": view}[written]).mul_(total.mean())
        view += 1.0
        return computed(base), computed(view)

    expected = change()
    with Chains(Kernels()):
        got = change()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_columns_alone_are_no_copy() -> None:
    kernels = Kernels()
    with Chains(kernels):
        base = noise(3, 6).sigmoid() * 2.0
        part = base[:, 2:]
        assert computed(part).data_ptr() == computed(base)[:, 2:].data_ptr()
    assert kernels.calls == {"chain": 1}


def test_columns_of_a_long_chain() -> None:
    """Each operation is looked at once, though two read it."""
    x, kernels = noise(3, 8), Kernels()

    def folded() -> torch.Tensor:
        y = x
        for i in range(MOST):
            y = y * 0.5 + y * float(i % 2)
        return torch.cat([-y[..., 4:], y[..., :4]], -1) * 2.0

    expected = folded()
    with Chains(kernels):
        assert torch.equal(computed(folded()), expected)


NOT_PUT_TOGETHER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of lines": lambda x: torch.cat([x, x], 0),
    "of two types": lambda x: torch.cat([x, x.half()], -1),
    "lines": lambda x: x[1:] * 2.0,
    "one column for all": lambda x: x[..., 1:2] * x + x[..., 2:4:2],
    "nothing": lambda x: torch.cat([x[..., 4:], x[..., :0]], -1),
    "three by turns": lambda x: torch.stack([x, x, x], -1).flatten(-2),
    "by turns in another place": lambda x: torch.stack([x, x], 1).flatten(1),
    "two by turns, otherwise": lambda x: torch.stack([x, x], -1).view(-1, 3),
    "numbers by turns": lambda x: torch.stack([x, x], -1),
}


@pytest.mark.parametrize("name", NOT_PUT_TOGETHER)
def test_other_parts_are_torchs(name: str) -> None:
    x = noise(3, 4)
    expected = NOT_PUT_TOGETHER[name](x.sigmoid() * x)
    with Chains(Kernels()):
        assert torch.equal(computed(NOT_PUT_TOGETHER[name](x.sigmoid() * x)), expected)


ROUTERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a softmax": lambda x: x.softmax(-1, dtype=FP32).topk(3),
    "logits": lambda x: x.topk(3),
    "rows of rows": lambda x: x.view(2, 2, 8).topk(2, dim=-1),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_largest_of_lines(name: str, dtype: torch.dtype) -> None:
    """A softmax before it is computed in the same launch, and a division behind it with its sum in another."""
    x, kernels = noise(4, 8, dtype=dtype), Kernels()
    expected, expected_places = ROUTERS[name](x)
    expected = (expected.float() / expected.float().sum(-1, keepdim=True)).to(dtype)
    with Chains(kernels):
        found, places = ROUTERS[name](x)
        found = found.float()
        found /= found.sum(-1, keepdim=True)
        got = computed(found.to(dtype))
    assert torch.equal(places, expected_places)
    assert torch.equal(got, expected)
    assert kernels.calls == {"top of softmax" if name == "a softmax" else "top": 1, "chain": 1}


def test_a_softmax_that_is_read_is_torchs_own() -> None:
    x, kernels = noise(4, 8), Kernels()
    expected = x.softmax(-1)
    with Chains(kernels):
        probabilities = x.softmax(-1)
        places = probabilities.topk(2).indices
        read = computed(probabilities)
        least = x.topk(2, largest=False).indices
        of_columns = x.topk(2, dim=0).indices
    assert torch.equal(read, expected)
    assert torch.equal(places, expected.topk(2).indices)
    assert torch.equal(least, x.sort().indices[:, :2])
    assert torch.equal(of_columns, x.sort(dim=0, descending=True).indices[:2])
    assert kernels.calls == {"top of softmax": 1}


NOT_NOTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "whole numbers": lambda x: x.long() + 1,
    "fp64": lambda x: x.double() * 2.0,
    "another exponent": lambda x: x.pow(3),
    "another rounding": lambda x: torch.div(x, 2.0, rounding_mode="floor"),
    "a sum of all": lambda x: x.sum(),
    "a sum without its dimension": lambda x: x.sum(-1),
    "a sum of lines": lambda x: x.sum(0, keepdim=True),
    "a mean in fp64": lambda x: x.mean(-1, keepdim=True, dtype=torch.float64),
    "another slope": lambda x: F.softplus(x, beta=2.0),
    "a share of the other": lambda x: torch.add(x, x, alpha=2),
    "limits that cross": lambda x: x.clamp(1, -1),
    "nothing": lambda x: x[:, :0] * 2.0,
    "one number": lambda x: x[0, 0] * 2.0,
}


@pytest.mark.parametrize("name", NOT_NOTED)
def test_what_no_kernel_has_is_torchs(name: str) -> None:
    x = noise(3, 4)
    expected = NOT_NOTED[name](x)
    with Chains(Kernels()):
        got = NOT_NOTED[name](x)
    assert type(got) is torch.Tensor
    assert torch.equal(got, expected)


def test_readers_get_the_content() -> None:
    """Views, products, lists and the host."""
    x, weight = noise(3, 4), noise(5, 4, seed=1)
    expected = x.sigmoid() * x
    with Chains(Kernels()):
        made = [x.sigmoid() * x for _ in range(5)]
        assert torch.equal(made[0].view(4, 3), expected.view(4, 3))
        assert torch.equal(F.linear(made[1], weight), F.linear(expected, weight))
        assert torch.equal(torch.cat([made[2], x]), torch.cat([expected, x]))
        assert made[3].tolist() == expected.tolist()
        assert made[4].to(torch.float32) is made[4]
        assert made[4].contiguous() is made[4]


def test_what_is_left_is_computed_at_the_end() -> None:
    x, chains = noise(4), Chains(Kernels())
    with chains:
        found = x.sigmoid() * x
        chains.compute_all()
    assert torch.equal(computed(found), x.sigmoid() * x)


def test_a_rehearsal_sees_what_a_chain_reads() -> None:
    """A tensor that is neither a weight nor made in the step is refused, as without chains."""
    known, foreign = noise(4), noise(4, seed=1)
    with Rehearsal([known.device], [known]), Chains(Kernels()):
        assert computed(known.sigmoid() * known).shape == (4,)
        with pytest.raises(NotCapturable, match="neither a weight nor an input"):
            computed(foreign.sigmoid() * known)


FAMILIES = [
    "cohere", "gemma2", "gemma3_text", "gemma4_text", "glm4", "gpt_oss", "kimi_linear", "lfm2", "nemotron_h",
    "olmo2", "olmo3", "phi3", "qwen3_5_text",
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=NEEDS_SLOTS if family == "qwen3_5_text" else ())
        for dtype, families in ((BF16, FAMILIES), (FP32, FAMILIES[::3]))
        for family in families
    ],
)
def test_families_answer_the_same(family: str, dtype: torch.dtype) -> None:
    """In fewer launches than operations, in bf16 bit by bit."""
    model = build("causal", config_class("causal", family)).eval().to(dtype)
    ids = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))

    def step() -> torch.Tensor:
        past = model(ids[:, :-1], use_cache=True).past_key_values
        logits: torch.Tensor = computed(model(ids[:, -1:], past_key_values=past, use_cache=True).logits)
        return logits

    expected, kernels = step(), Kernels()
    with fused(Fusion(model, kernels)):
        got = step()
    if dtype == BF16:
        assert torch.equal(got, expected)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert kernels.calls["chain"] >= 4


@pytest.mark.parametrize("way", ["in place", "another tensor"])
def test_constants_of_a_chain_that_change(way: str) -> None:
    """A buffer that embeddings are multiplied by, between two calls with captured steps."""
    model = build("causal", config_class("causal", "gemma3_text")).eval()
    ids, kernels = torch.tensor([[5, 6, 7]]), Kernels()
    options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    answers = []
    for _ in range(2):
        with captured_steps(kernels):
            answers.append(model.generate(ids, **options, cache_implementation="paged"))
        assert torch.equal(answers[-1], model.generate(ids, **options))
        if way == "in place":
            model.model.embed_tokens.embed_scale.mul_(-3)
        else:
            model.model.embed_tokens.embed_scale = model.model.embed_tokens.embed_scale * -3
    assert not torch.equal(*answers)
    assert counts(model)["replayed"]
    assert kernels.calls["chain"]


@pytest.mark.parametrize("around", [torch.enable_grad, lambda: torch.autocast("cpu", BF16)])
def test_gradients_and_autocast_are_left_alone(around: Any) -> None:
    model = build("causal", config_class("causal", "phi3")).eval()
    kernels = Kernels()
    with around(), fused(Fusion(model, kernels)):
        model(torch.tensor([[5, 6]]), use_cache=False)
    assert not kernels.calls["chain"]
