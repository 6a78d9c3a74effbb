"""A sum over ranks with an addition and a norm: all parts in one process, flags set by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_cases import DEVICE, load

kernels = load()
BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-5


def noise(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def flags(programs: int, rank: int, ranks: int) -> list[torch.Tensor]:
    """Those of all ranks, of which the others have said that their parts are there."""
    pads = [torch.zeros(ranks * programs + 1, dtype=torch.int32, device=DEVICE) for _ in range(ranks)]
    pads[rank][: ranks * programs] = 1
    pads[rank][rank : ranks * programs : ranks] = 0
    return pads


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "programs"), [((1, 1, 64), 1), ((5, 1, 300), 5), ((1, 3, 1024), 3), ((7, 1, 96), 3)]
)
def test_as_one_after_the_other(
    shape: tuple[int, ...], programs: int, ranks: int, dtype: torch.dtype, centered: bool
) -> None:
    """On all ranks the bits of a sum, an addition and a norm; the others' flags are taken, own ones put."""
    parts = [noise(*shape, dtype=dtype, seed=5 + seed) for seed in range(ranks)]
    residual = noise(*shape, dtype=dtype, seed=3)
    weight = noise(shape[-1], dtype=dtype, seed=4)
    summed = torch.zeros_like(residual, dtype=FP32)
    for part in parts:
        summed += part
    total, normed = kernels.add_rms_norm(summed.to(dtype), residual, weight, EPS, centered=centered)
    found = []
    for rank in range(ranks):
        pads = flags(programs, rank, ranks)
        got = kernels.reduce_add_rms_norm(parts, pads, rank, residual, weight, EPS, centered=centered)
        found.append(got)
        assert not pads[rank].any()
        put = torch.zeros_like(pads[0])
        put[rank : ranks * programs : ranks] = 1
        assert all(torch.equal(pads[other], put) for other in range(ranks) if other != rank)
    for one, other in itertools.pairwise(found):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    # The interpreter cuts off where bfloat16 should be rounded.
    close = {} if DEVICE == "cuda" or dtype == FP32 else {"rtol": 4e-2, "atol": 4e-2}
    torch.testing.assert_close(found[0][0], total, **(close or {"rtol": 0, "atol": 0}))
    torch.testing.assert_close(found[0][1], normed, **(close or {"rtol": 1e-5, "atol": 1e-5}))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"parts": [torch.ones(2, 8), torch.ones(2, 4)]}, r"parts: .*\[\[2, 8\], \[2, 4\]\]"),
        ({"parts": [torch.ones(2, 8)]}, "parts: expected several"),
        ({"residual": torch.ones(2, 4)}, r"residual or weight: expected \[2, 8\]"),
        ({"weight": torch.ones(4)}, r"residual or weight: .*\[8\], got"),
        ({"pads": [torch.zeros(1, dtype=torch.int32)] * 2}, r"2 of 2 flags or more, got \[1, 1\]"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], match: str) -> None:
    given = {
        "parts": [torch.ones(2, 8), torch.ones(2, 8)],
        "pads": [torch.zeros(4, dtype=torch.int32)] * 2,
        "rank": 0,
        "residual": torch.ones(2, 8),
        "weight": torch.ones(8),
        "eps": EPS,
    }
    with pytest.raises(ValueError, match=match):
        kernels.reduce_add_rms_norm(**{**given, **change})
