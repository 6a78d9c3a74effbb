"""Decode attention against the float64 reference: few cases in the interpreter, the whole matrix on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, GPU, Case, assert_close, ints, load

kernels = load()
Tiling = kernels.tuning.Tiling
SMALL = None if GPU else Tiling(16, 16, 1, 1, 2)
RAGGED = [700, 1, 0, 4097, 64, 333] if GPU else [37, 1, 0, 70, 16]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def decode(case: Case, tiling: Any = SMALL) -> torch.Tensor:
    mean = sum(case.lengths) // len(case.lengths)
    plan = kernels.Plan(
        case.query, case.keys, case.values, mean_length=mean, window=case.window, tiling=tiling
    )
    plan.partial.fill_(torch.nan)
    plan.weight.fill_(torch.nan)
    plan.pieces.fill_(2**30)
    plan.update(ints(case.lengths), None if case.starts is None else ints(case.starts))
    return attend(case, plan)


def attend(case: Case, plan: Any) -> torch.Tensor:
    out = torch.full_like(case.expected(), torch.nan, dtype=case.dtype)
    return kernels.decode(
        case.query, case.keys, case.values, case.table, plan,
        softcap=case.softcap, sinks=case.sinks, out=out,
    )  # fmt: skip


def verify(case: Case, tiling: Any = SMALL) -> None:
    assert_close(decode(case, tiling), case.expected())


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 64] if GPU else [1, 16, 32])
def test_layouts_and_block_sizes(block_size: int, by_head: bool) -> None:
    verify(Case(RAGGED, block_size=block_size, by_head=by_head, key_dim=32 if not GPU else 128))


FEATURES = {
    "window": {"window": 20},
    "window of one": {"window": 1},
    "starts": {"starts": [5, 0, 0, 33, 16, 7]},
    "starts and window": {"starts": [5, 0, 0, 69, 3, 300], "window": 9},
    "softcap": {"softcap": 5.0},
    "sinks": {"with_sinks": True},
    "everything": {
        "starts": [30, 1, 0, 40, 0, 2],
        "window": 24,
        "softcap": 30.0,
        "with_sinks": True,
    },
    "wide values": {"key_dim": 48, "value_dim": 32},
    "wide values by token": {"key_dim": 32, "value_dim": 80, "block_size": 4},
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    features = {"key_dim": 32, **FEATURES[name]}
    if "starts" in features:
        features["starts"] = features["starts"][: len(RAGGED)]
    for dtype in (BF16, FP32) if GPU else (FP32,):
        verify(Case(RAGGED, group=4, dtype=dtype, seed=3, **features))


@pytest.mark.parametrize("group", [1, 3] if not GPU else [1, 2, 3, 4, 5, 7, 8, 16])
def test_groups(group: int) -> None:
    verify(
        Case(RAGGED[:3], heads=1 if group > 8 else 3, group=group, key_dim=32, dtype=BF16 if GPU else FP32)
    )


def test_rows_with_nothing_to_see_give_zero() -> None:
    for sinks in (False, True):
        case = Case([0, 9, 40], starts=[0, 9, 0], key_dim=32, with_sinks=sinks)
        assert decode(case)[:2].count_nonzero() == 0
        verify(case)


def test_one_long_row_in_many_pieces() -> None:
    verify(
        Case([50_000 if GPU else 330], heads=1, key_dim=128 if GPU else 16, group=4),
        Tiling(16, 16, 1, 2, 8) if GPU else Tiling(16, 16, 1, 1, 5),
    )


def test_queries_cut_from_a_wider_product() -> None:
    case = Case([40, 3], key_dim=32)
    case.query = torch.cat([case.query, torch.full_like(case.query, torch.nan)], dim=1)[
        :, : case.query.shape[1]
    ]
    verify(case)


def test_a_plan_serves_step_after_step() -> None:
    case = Case([70, 33], key_dim=32)
    plan = kernels.Plan(case.query, case.keys, case.values, mean_length=50, tiling=SMALL)
    for lengths in ([70, 33], [1, 33], [0, 2], [65, 0]):
        case.lengths = lengths
        plan.update(ints(lengths))
        assert_close(attend(case, plan), case.expected())
        assert plan.done.count_nonzero() == 0


@pytest.mark.parametrize("seed", range(4))
def test_pieces_cover_every_row_once(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows = [1, 3, 8, 17][seed]
    lengths = torch.randint(0, 200, (rows,), generator=random).tolist()
    starts = torch.randint(0, 60, (rows,), generator=random).tolist()
    blank = torch.empty(rows, 4, 8, device=DEVICE)
    plan = kernels.Plan(
        blank,
        blank[None, :, :2],
        blank[None, :, :2],
        mean_length=9,
        window=90,
        tiling=Tiling(16, 16, 1, 1, 3),
    )
    plan.update(ints(lengths), ints(starts))
    pieces = plan.pieces[: int(plan.count)].tolist()
    sizes = [end // 16 - begin // 16 for _, begin, end, *_ in pieces if end > begin]
    assert len(pieces) <= plan.most
    assert len(sizes) < 2 or max(sizes[1:]) <= sizes[0] + 1
    for row in range(rows):
        mine = [piece for piece in pieces if piece[0] == row]
        first = pieces.index(mine[0])
        assert [piece[3:5] for piece in mine] == [[first, len(mine)]] * len(mine)
        seen = [token for piece in mine for token in range(piece[1], piece[2])]
        assert seen == list(range(max(starts[row], lengths[row] - 90), lengths[row]))


def test_refuses_what_does_not_fit() -> None:
    case = Case([4], key_dim=32)
    plan = kernels.Plan(case.query, case.keys, case.values, mean_length=4, tiling=SMALL)
    with pytest.raises(ValueError, match="Invalid shape of query"):
        kernels.decode(case.query[:, :3], case.keys, case.values, case.table, plan)
    with pytest.raises(ValueError, match="Invalid shape of lengths"):
        plan.update(ints([1, 2]))
    with pytest.raises(ValueError, match="power of two"):
        kernels.decode(case.query, case.keys[:, :3], case.values[:, :3], case.table, plan)


gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("key_dim", [64, 80, 96, 128, 192, 256, 512])
def test_matrix(key_dim: int, dtype: torch.dtype) -> None:
    shapes = [(1, 16), (4, 16), (8, 64)] if dtype == BF16 else [(4, 16)]
    for number, (group, block_size) in enumerate(shapes):
        for rows in ([2500], RAGGED, [300] * 70, [1100] * 40 + [5000]):
            verify(
                Case(
                    rows,
                    group=group,
                    block_size=block_size,
                    key_dim=key_dim,
                    dtype=dtype,
                    by_head=number % 2 == 0,
                )
            )


@gpu
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 32, 64, 128, 256])
def test_every_block_size(block_size: int) -> None:
    verify(
        Case(
            [2000, 77, 0, 513],
            group=4,
            block_size=block_size,
            key_dim=128,
            dtype=BF16,
            by_head=True,
            starts=[130, 3, 0, 0],
        )
    )


@gpu
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(16, 128, 4, 3, 1),
        Tiling(16, 64, 4, 3, 3),
        Tiling(64, 64, 4, 3, 1),
        Tiling(16, 32, 1, 4, 4),
        Tiling(16, 32, 2, 4, 2),
    ],
)
def test_tilings(tiling: Any) -> None:
    for length in (5, 129, 3000):
        verify(Case([length, 2 * length], heads=8, group=4, key_dim=128, dtype=BF16, by_head=True), tiling)


@gpu
@pytest.mark.parametrize("by_head", [False, True])
def test_offsets_past_two_to_the_31(by_head: bool) -> None:
    spare = 2**31 // (16 * 8 * 128) // (2 if by_head else 1) + 5
    case = Case([900, 17], heads=8, group=4, key_dim=128, dtype=BF16, by_head=by_head, spare=spare)
    assert case.keys.stride(0) * case.keys.shape[0] > 2**31
    verify(case)


@gpu
def test_a_captured_step_follows_the_lengths() -> None:
    case = Case([900, 317, 40, 2], heads=8, group=4, key_dim=128, dtype=BF16, by_head=True)
    plan = kernels.Plan(case.query, case.keys, case.values, mean_length=300)
    lengths, out = ints(case.lengths), torch.empty_like(case.query)

    def step() -> None:
        plan.update(lengths)
        kernels.decode(case.query, case.keys, case.values, case.table, plan, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for counts in ([900, 317, 40, 2], [1, 317, 0, 1], [450, 3, 39, 0]):
        case.lengths = counts
        lengths.copy_(ints(counts))
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, case.expected())


@gpu
def test_the_same_step_gives_the_same_bits() -> None:
    case = Case([9000, 3170, 401], heads=8, group=4, key_dim=128, dtype=BF16, by_head=True)
    plan = kernels.Plan(case.query, case.keys, case.values, mean_length=3000, tiling=Tiling(16, 32, 2, 4, 6))
    plan.update(ints(case.lengths))
    first = attend(case, plan)
    for _ in range(200):
        assert torch.equal(kernels.decode(case.query, case.keys, case.values, case.table, plan), first)
