"""The C++ op of CPUs over blocks that rows have in common, against float64 and against every row by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import pairwise
from common_blocks import SHAPES, Common, groups_of, random_tree, with_common
from kernel_cases import GPU, Case, assert_close, ints
from native_cases import attend

import hf_paged_native as native

pytestmark = [
    pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler to build the op with"),
    pytest.mark.skipif(GPU, reason="where there is a GPU the cases lie on it, and the op is the CPU's"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REGISTERS = ("DEFAULT", torch.backends.cpu.get_cpu_capability())
LONGER: dict[str, tuple[list[int], Common]] = {
    "over chunks": ([1300, 1200, 1207, 1500], [([0, 1, 2, 3], 40), ([1, 2], 75)]),
    "up to a chunk's end": ([530, 513, 700], [([0, 1, 2], 32)]),
    "more rows than are served at once": ([50 + i for i in range(75)], [(list(range(75)), 3)]),
}


@pytest.fixture(scope="module", autouse=True)
def _extensions(native_folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(native_folder))
        yield


def verify(case: Case, common: Common, tokens: int = 1, registers: str | None = None) -> None:
    """Like the reference, and in float32 like every row by itself."""
    groups = groups_of(with_common(case, common), new=tokens)
    assert bool(groups.count_nonzero()) == bool(common)
    library = native.load(native.build(registers))
    found = attend(library, case, tokens, groups)
    assert_close(found, case.expected())
    if case.dtype == FP32:
        torch.testing.assert_close(found, attend(library, case, tokens), atol=1e-6, rtol=1e-6)


ALL = SHAPES | LONGER


@pytest.mark.parametrize(
    ("name", "dtype", "registers"), pairwise([*ALL], [FP32, BF16, FP16], REGISTERS), ids=str
)
def test_groups_read_what_their_rows_would(name: str, dtype: torch.dtype, registers: str) -> None:
    lengths, common = ALL[name]
    verify(Case(lengths, group=4, key_dim=32, dtype=dtype), common, registers=registers)


FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0}, "sinks": {"with_sinks": True}, "both": {"softcap": 0.5, "with_sinks": True},
    "wide keys": {"key_dim": 48, "value_dim": 20}, "wide values": {"key_dim": 20, "value_dim": 72},
    **{f"heads of {dim}": {"key_dim": dim} for dim in (1, 40, 128, 256)},
    **{f"a group of {group}": {"group": group} for group in (1, 3, 7, 16)},
    **{f"blocks of {size}": {"block_size": size, "by_head": True} for size in (1, 4, 32)},
    "several tokens": {"tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    given = {"block_size": 16, "tokens": 1, "key_dim": 32, **FEATURES[name]}
    tokens, size = given.pop("tokens"), given["block_size"]
    case = Case([70, 66 + tokens, 68, 33], [tokens] * 4, seed=len(name), **given)
    verify(case, [([0, 1, 2, 3], 32 // size), ([0, 1, 2], 64 // size)], tokens)


def test_a_plan_serves_groups_that_come_and_go() -> None:
    """The answer is the same as without them before and behind."""
    case = with_common(Case([700, 660, 900, 40], key_dim=32), [([0, 1, 2], 40)])
    query, keys, values = case.query[:, :, None], case.keys.flatten(0, 1), case.values.flatten(0, 1)
    plan = native.Attend(native.load(native.build()), query, keys, values, case.block_size)
    for groups in (None, groups_of(case), None, groups_of(case)):
        plan.update(case.table, ints(case.lengths), groups)
        assert_close(plan.run(query, keys, values).flatten(0, 1), case.expected())


def test_refuses_what_does_not_fit() -> None:
    case = with_common(Case([70, 66], key_dim=32), [([0, 1], 4)])
    query, keys, values = case.query[:, :, None], case.keys.flatten(0, 1), case.values.flatten(0, 1)
    for window, groups in ((5, groups_of(case)), (None, groups_of(case)[:1])):
        plan = native.Attend(native.load(native.build()), query, keys, values, case.block_size, window)
        with pytest.raises(ValueError, match="Invalid groups"):
            plan.update(case.table, ints(case.lengths), groups)


def test_common_parts_that_end_at_the_last_token() -> None:
    """A row whose own part has no token: all that it has is common."""
    case = with_common(Case([64, 70], key_dim=32, with_sinks=True), [([0, 1], 4)])
    groups = groups_of(case, [65, 70])  # as if row 0 had one more
    assert groups[0, 3] == 64
    assert_close(attend(native.load(native.build()), case, groups=groups), case.expected())


@pytest.mark.parametrize("seed", range(6))
def test_random_trees(seed: int) -> None:
    lengths, common = random_tree(seed, [3, 9, 14, 40, 60, 80][seed], several=40 if seed > 2 else 5)
    verify(Case(lengths, heads=1, group=2, key_dim=16, seed=seed), common)


def test_the_same_bits_for_any_number_of_threads() -> None:
    case = with_common(
        Case([1500, 1440, 0, 700, 1400], heads=4, group=3, key_dim=40, with_sinks=True),
        [([0, 1, 3, 4], 40), ([0, 1], 80)],
    )
    groups = groups_of(case)
    alone = attend(native.load(native.build()), case, groups=groups)
    torch.set_num_threads(2)
    try:
        for _ in range(10):
            assert torch.equal(attend(native.load(native.build()), case, groups=groups), alone)
    finally:
        torch.set_num_threads(1)
