"""Attention of several query tokens a row against the float64 reference."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from kernel_cases import GPU, Case, assert_close, ints, load

kernels = load()
Tiling = kernels.tuning.Tiling
SMALL = None if GPU else Tiling(16, 16, 1, 1)
LENGTHS, QUERIES = ([700, 33, 5, 1500, 64], [700, 12, 0, 300, 1]) if GPU else ([37, 20, 5], [37, 6, 0])
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def verify(case: Case, tiling: Any = SMALL) -> None:
    expected = case.expected()
    out = torch.full_like(expected, torch.nan, dtype=case.dtype)
    kernels.prefill(
        case.query, case.keys, case.values, case.table, ints([0, *accumulate(case.queries)]), ints(case.lengths), max(case.queries),
        starts=None if case.starts is None else ints(case.starts), window=case.window, causal=case.causal,
        softcap=case.softcap, sinks=case.sinks, out=out, tiling=tiling,
    )  # fmt: skip
    assert_close(out, expected)


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("window", [None, 11])
def test_tiles_that_the_device_has_laid_out(least: int, window: int | None) -> None:
    """Every row's tokens as without it, more rows than there are, and those of too short rows left alone."""
    case = Case([*LENGTHS, 9, 1], [*QUERIES, 1, 1], window=window, key_dim=64 if GPU else 16)
    expected, counts = case.expected(), [*case.queries, 0, 0, 0]
    borders = ints([0, *accumulate(counts)])
    table = torch.cat([case.table, case.table.new_zeros(3, case.table.shape[1])])
    spans = kernels.Spans(case.query, case.keys, case.values, len(counts), least=least, tiling=SMALL)
    for _ in range(2):  # what another step has left there changes nothing
        spans.update(borders)
        out = torch.full_like(expected, 7.0, dtype=case.dtype)
        kernels.prefill(
            case.query,
            case.keys,
            case.values,
            table,
            borders,
            ints([*case.lengths, 0, 0, 0]),
            0,
            window=window,
            out=out,
            spans=spans,
        )
        short = torch.tensor([count < least for count in counts for _ in range(count)], device=out.device)
        assert_close(out[~short], expected[~short])
        assert bool((out[short] == 7.0).all())
        spans.update(ints([0, *accumulate(reversed(counts))]))
    with pytest.raises(ValueError, match="borders"):
        spans.update(borders[1:])


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 64] if GPU else [4, 32])
def test_layouts_and_block_sizes(block_size: int, by_head: bool) -> None:
    verify(Case(LENGTHS, QUERIES, block_size=block_size, by_head=by_head, key_dim=128 if GPU else 16))


FEATURES = {
    "window": {"window": 11},
    "long window": {"window": 333 if GPU else 30},
    "starts": {"starts": [3, 17, 0, 470, 2]},
    "starts past the first queries": {"starts": [30, 17, 0, 1300, 64]},
    "softcap": {"softcap": 5.0},
    "sinks": {"with_sinks": True},
    "everything": {
        "starts": [9, 16, 0, 40, 0],
        "window": 19,
        "softcap": 30.0,
        "with_sinks": True,
    },
    "not causal": {"causal": False},
    "other values": {"key_dim": 32, "value_dim": 48},
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    features = {"key_dim": 64 if GPU else 16, **FEATURES[name]}
    if "starts" in features:
        features["starts"] = features["starts"][: len(LENGTHS)]
    for dtype in (BF16, FP32) if GPU else (FP32,):
        verify(Case(LENGTHS, QUERIES, dtype=dtype, seed=4, heads=1 if not GPU else 2, **features))


@pytest.mark.parametrize("group", [3] if not GPU else [1, 3, 4, 7, 16])
def test_groups(group: int) -> None:
    verify(Case(LENGTHS, QUERIES, heads=1, group=group, key_dim=16, dtype=BF16 if GPU else FP32))


def test_tokens_to_verify() -> None:
    """A few query tokens behind a longer context, as assisted decoding asks."""
    verify(Case([50, 31, 6] if not GPU else [5000, 31, 6], [4, 1, 6], heads=1, key_dim=16))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("key_dim", [64, 80, 96, 128, 192, 256, 512])
def test_matrix(key_dim: int, dtype: torch.dtype) -> None:
    for group, block_size in ((1, 16), (4, 16), (8, 64)) if dtype == BF16 else ((4, 16),):
        for queries in (QUERIES, [9, 9, 5, 7, 1]):
            verify(
                Case(
                    LENGTHS,
                    queries,
                    heads=2,
                    group=group,
                    block_size=block_size,
                    key_dim=key_dim,
                    dtype=dtype,
                    by_head=True,
                )
            )


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_offsets_past_two_to_the_31() -> None:
    spare = 2**31 // (16 * 8 * 128) + 5
    verify(Case([900, 170], [800, 3], heads=8, group=4, key_dim=128, dtype=BF16, spare=spare))
