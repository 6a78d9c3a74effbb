"""Attention and products of the batch-invariant kernels: what masks say, which product is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, load
from torch.nn import functional as F  # its usual name

kernels = load()
TOKENS = 37
PLACE = torch.arange(TOKENS, device=DEVICE)


@pytest.fixture
def invariant() -> Any:
    return kernels.Invariant(kernels)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


QUERY, KEYS, VALUES = (
    noise(3, 4, TOKENS, 16),
    noise(3, 2, TOKENS, 16, seed=1),
    noise(3, 2, TOKENS, 24, seed=2),
)


def stock(mask: torch.Tensor | None = None, query: torch.Tensor = QUERY, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, KEYS, VALUES, attn_mask=mask, enable_gqa=True, **options)


def padded(window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens are there, [3, tokens], and a mask over them: padding before, behind and in the middle."""
    there = torch.ones(3, TOKENS, dtype=torch.bool, device=DEVICE)
    there[0, :9] = there[1, 30:] = there[2, 11:14] = False
    rank = there.cumsum(-1)
    mask = (PLACE[None] <= PLACE[:, None]) & there[:, None]
    if window is not None:
        mask &= rank[:, :, None] - rank[:, None] < window
    return there, mask[:, None]


def test_causal(invariant: Any) -> None:
    torch.testing.assert_close(
        invariant.attend(QUERY, KEYS, VALUES, causal=True), stock(is_causal=True), rtol=0, atol=2e-5
    )
    last = invariant.attend(QUERY[:, :, -1:], KEYS, VALUES, scale=0.3)
    torch.testing.assert_close(last, stock(query=QUERY[:, :, -1:], scale=0.3), rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("added", [False, True])
def test_padding(invariant: Any, window: int | None, added: bool) -> None:
    there, mask = padded(window)
    given = (
        torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, torch.finfo(torch.float32).min)
        if added
        else mask
    )
    found = invariant.attend(QUERY, KEYS, VALUES, given)
    seen = there[:, None, :, None].expand_as(found)
    torch.testing.assert_close(found[seen], stock(mask)[seen], rtol=0, atol=2e-5)
    assert not found[~seen].any()


def test_several_sequences_in_a_row(invariant: Any) -> None:
    of = torch.tensor([0] * 10 + [1] * 20 + [2] * 7, device=DEVICE)
    mask = ((PLACE[None] <= PLACE[:, None]) & (of[None] == of[:, None]))[None, None].expand(3, 1, -1, -1)
    found = invariant.attend(QUERY, KEYS, VALUES, mask)
    torch.testing.assert_close(found, stock(mask), rtol=0, atol=2e-5)
    # Each is computed as if it were alone, so its sums begin with its own first token.
    own = (each[:, :, 10:30] for each in (QUERY, KEYS, VALUES))
    assert torch.equal(invariant.attend(*own, causal=True), found[:, :, 10:30])


def test_a_chunk_behind_what_is_known(invariant: Any) -> None:
    mask = (PLACE[None] <= PLACE[-4:, None])[None, None].expand(3, 4, -1, -1)
    found = invariant.attend(QUERY[:, :, -4:], KEYS, VALUES, mask)
    torch.testing.assert_close(found, stock(mask, QUERY[:, :, -4:]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_is_read_anew_when_it_has_changed(invariant: Any, inference: bool) -> None:
    with torch.inference_mode(inference):
        _read_anew(invariant)


def _read_anew(invariant: Any) -> None:
    mask = padded()[1].clone()
    before = invariant.attend(QUERY, KEYS, VALUES, mask)
    mask[:, :, :, 20] = False
    found = invariant.attend(QUERY, KEYS, VALUES, mask)
    assert not torch.equal(before, found)
    assert torch.equal(found, kernels.Invariant(kernels).attend(QUERY, KEYS, VALUES, mask))
    assert torch.equal(invariant.attend(QUERY, KEYS, VALUES, mask[:, :, :, :TOKENS]), found)


MASKS = {
    "holes": (PLACE[None] <= PLACE[:, None]) & ((PLACE[None] + PLACE[:, None]) % 3 > 0),
    "what comes later": PLACE[None] <= PLACE[:, None] + 1,
    "a bias": torch.where(PLACE[None] <= PLACE[:, None], -0.5, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("case", MASKS)
def test_other_masks_are_refused(invariant: Any, case: str) -> None:
    with pytest.raises(
        kernels.NoFixedOrder, match="a mask that is not causal over the tokens of each sequence"
    ):
        invariant.attend(QUERY, KEYS, VALUES, MASKS[case].expand(3, 1, -1, -1))


def test_other_attention_is_refused(invariant: Any) -> None:
    with pytest.raises(kernels.NoFixedOrder, match="attention that is not causal"):
        invariant.attend(QUERY, KEYS, VALUES)
    with pytest.raises(kernels.NoFixedOrder, match="of some tokens over more keys without a mask"):
        invariant.attend(QUERY[:, :, :3], KEYS, VALUES, causal=True)
    with pytest.raises(
        kernels.NoFixedOrder, match=r"a mask of \[3, 4, 37, 37\], not \[batches, 1, tokens, columns\]"
    ):
        invariant.attend(QUERY, KEYS, VALUES, padded()[1].repeat(1, 4, 1, 1))


def test_torchs_product_only_where_it_has_the_same_bits(
    invariant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C44: another order would be seen on the first random numbers."""
    x, w, bias = noise(40, 64), noise(32, 64).t(), noise(32)
    ours = kernels.product(x[None], w[None], bias)[0]
    module = type(invariant).mm.__globals__
    calls = []

    def same(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(x)
        return kernels.product(x[None], w[None], bias)[0]

    monkeypatch.setitem(module, "_torchs", same)
    monkeypatch.setitem(module, "MOST_TRIES", 8)
    assert torch.equal(invariant.mm(x, w, bias), ours)
    assert calls[0] is not x
    assert calls[-1] is x
    assert invariant.is_torchs_linear(x.view(4, 10, 64), w.t(), bias)
    assert not invariant.is_torchs_linear(x[:39], w.t(), bias)
    assert not invariant.is_torchs_linear(x, w.t(), None)
    assert not invariant.is_torchs_linear(x, w.t().contiguous().t().contiguous().t(), bias)
    other = kernels.Invariant(kernels)
    monkeypatch.setitem(module, "_torchs", lambda *given: same(*given) + 1e-6)
    assert torch.equal(other.mm(x, w, bias), ours)


@pytest.mark.parametrize("columns", [1, 8])
def test_another_order_is_seen_in_small_answers(
    invariant: Any, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """C44: halves of two orders differ in one of ten thousand numbers, and an adapter's rank may be 1."""
    x, w = noise(1, 256).half(), noise(columns, 256).t().half()
    calls = []

    def split(x: torch.Tensor, w: torch.Tensor, bias: None) -> torch.Tensor:
        calls.append(x)
        parts = zip(x.float().split(128, 1), w.float().split(128), strict=True)
        return sum(kernels.product(one[None], two[None])[0] for one, two in parts).half()

    monkeypatch.setitem(type(invariant).mm.__globals__, "_torchs", split)
    assert torch.equal(invariant.mm(x, w), kernels.product(x[None], w[None])[0])
    assert not invariant.is_torchs_linear(x, w.t(), None)
    assert 1 < len(calls) < 20


def test_fused_kernels_round_as_the_operations_do(invariant: Any) -> None:
    """C44: captured steps launch them, trainers' forwards compute one operation after the other."""
    for width in (64, 96, 3000):
        x, residual, weight = noise(7, width), noise(7, width, seed=1), noise(width, seed=2)
        total = residual + x
        scaled = total * torch.rsqrt(invariant.rows("mean", total * total)[:, None] + 1e-6)
        found = invariant.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(found[0], total)
        torch.testing.assert_close(found[1], weight * scaled, rtol=1e-6, atol=1e-6)
        assert torch.equal(invariant.rms_norm(total, weight, 1e-6), found[1])
        for name in ("silu", "gelu_tanh"):
            gated = invariant.mapped(name, x) * residual
            assert torch.equal(invariant.swiglu(x, residual, activation=name), gated)
