"""Decode attention in which rows read common blocks together, against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common_blocks import SHAPES, Common, groups_of, random_tree, with_common
from kernel_cases import GPU, Case, assert_close, ints, load

kernels = load()
Tiling = kernels.tuning.Tiling
SMALL = None if GPU else Tiling(16, 16, 1, 1, 2)
WIDE = None if GPU else Tiling(16, 16, 1, 1, 1)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def plan_of(case: Case, tiling: Any = SMALL, shared: Any = WIDE) -> Any:
    mean = sum(case.lengths) // len(case.lengths)
    plan = kernels.Plan(
        case.query, case.keys, case.values, mean_length=mean, tiling=tiling, shared=True, shared_tiling=shared
    )
    for each in (plan.partial, plan.weight):
        each.fill_(torch.nan)
    for each in (plan.pieces, plan.shared.pieces):
        each.fill_(2**28)
    return plan


def attend(case: Case, plan: Any, groups: torch.Tensor) -> torch.Tensor:
    plan.update(ints(case.lengths), groups=groups)
    out = torch.full_like(case.expected(), torch.nan, dtype=case.dtype)
    return kernels.decode(
        case.query, case.keys, case.values, case.table, plan,
        softcap=case.softcap, sinks=case.sinks, out=out,
    )  # fmt: skip


def verify(case: Case, common: Common, tiling: Any = SMALL, shared: Any = WIDE) -> Any:
    with_common(case, common)
    plan = plan_of(case, tiling, shared)
    assert_close(attend(case, plan, groups_of(case)), case.expected())
    assert plan.done.count_nonzero() == 0
    return plan


@pytest.mark.parametrize("name", SHAPES)
def test_groups_read_what_their_rows_would(name: str) -> None:
    lengths, common = SHAPES[name]
    for dtype in (BF16, FP32) if GPU else (FP32,):
        plan = verify(Case(lengths, group=4, key_dim=128 if GPU else 32, dtype=dtype), common)
        assert bool(int(plan.shared.count)) == bool(common)


@pytest.mark.parametrize(
    "features", [{"softcap": 5.0}, {"with_sinks": True}, {"key_dim": 48, "value_dim": 32}, {"key_dim": 512}]
)
def test_features(features: dict[str, Any]) -> None:
    verify(Case([70, 66, 33], group=2, seed=3, **{"key_dim": 32, **features}), [([0, 1], 4)])


@pytest.mark.parametrize("group", [1, 3] if not GPU else [1, 2, 3, 4, 5, 7, 8, 16])
def test_query_heads_of_a_key_head(group: int) -> None:
    verify(Case([70, 66, 65, 33], heads=2, group=group, key_dim=32), [([0, 1, 2], 4), ([0, 1, 2, 3], 1)])


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_block_sizes(block_size: int) -> None:
    verify(Case([70, 66, 33], key_dim=32, block_size=block_size, by_head=True), [([0, 1], 64 // block_size)])


def test_a_plan_serves_groups_that_come_and_go() -> None:
    """A step that was captured without groups is replayed with, and the reverse."""
    case = with_common(Case([70, 66, 90, 40], key_dim=32), [([0, 1, 2], 4)])
    found = groups_of(case)
    groups = torch.zeros_like(found)
    plan = plan_of(case)
    for now in (torch.zeros_like(found), found, torch.zeros_like(found), found):
        groups.copy_(now)
        assert_close(attend(case, plan, groups), case.expected())
        assert bool(int(plan.shared.count)) == bool(now.count_nonzero())


@pytest.mark.skipif(not GPU, reason="GPUs launch a kernel beside the one before it, the interpreter does not")
def test_a_launch_beside_the_reading_of_common_blocks() -> None:
    """Rows are merged behind both, in every replay, however programs of the two kernels follow one another."""
    case = with_common(
        Case([900, 70, 700, 650, 90, 820], heads=2, group=4), [([0, 2, 3, 5], 40), ([1, 4], 4)]
    )
    found, none = groups_of(case), torch.zeros_like(groups_of(case))
    answers, plans = [], []
    for early in (False, True):
        plan = plan_of(case)
        assert plan.shared.early == (torch.cuda.get_device_capability() >= (9, 0))
        plan.shared.early &= early
        answers.append([attend(case, plan, groups).clone() for groups in (found, none)])
        plans.append(plan)
    assert_close(answers[0][0], case.expected())
    assert all(map(torch.equal, *answers))
    out = torch.empty_like(case.query)
    graph, groups = torch.cuda.CUDAGraph(), found.clone()
    lengths = ints(case.lengths)
    with torch.cuda.graph(graph):
        for _ in range(20):
            plans[1].update(lengths, groups=groups)
            kernels.decode(case.query, case.keys, case.values, case.table, plans[1], out=out)
    for replay in range(500):
        groups.copy_((found, none)[replay % 2])
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, answers[0][replay % 2]), replay


def test_common_parts_that_end_at_the_last_token() -> None:
    """A row whose own part has no token: all that it has is common."""
    case = with_common(Case([64, 70], key_dim=32, with_sinks=True), [([0, 1], 4)])
    groups = groups_of(case, [65, 70])  # as if row 0 had one more
    assert groups[0, 3] == 64
    assert_close(attend(case, plan_of(case), groups), case.expected())


@pytest.mark.parametrize("seed", range(3))
def test_random_trees(seed: int) -> None:
    lengths, common = random_tree(seed, [3, 9, 14][seed] * (4 if GPU else 1))
    verify(Case(lengths, heads=1, group=2, key_dim=16 if not GPU else 64, seed=seed), common)


def test_query_heads_that_fill_a_tile_leave_no_room_for_other_rows() -> None:
    case = with_common(Case([70, 66], heads=1, group=16, key_dim=16), [([0, 1], 4)])
    plan = kernels.Plan(
        case.query, case.keys, case.values, mean_length=9, tiling=SMALL, shared=True,
        shared_tiling=Tiling(16, 16, 1, 1, 1),
    )  # fmt: skip
    assert_close(attend(case, plan, groups_of(case)), case.expected())
    assert plan.shared is None


def test_refuses_what_does_not_fit() -> None:
    case = Case([4], key_dim=32)
    with pytest.raises(ValueError, match="Invalid shared"):
        kernels.Plan(case.query, case.keys, case.values, mean_length=4, window=3, shared=True)
    plan = kernels.Plan(case.query, case.keys, case.values, mean_length=4, tiling=SMALL, shared=True)
    with pytest.raises(ValueError, match="Invalid groups"):
        plan.update(ints([4]), groups=ints([0] * 7).view(1, 7))
