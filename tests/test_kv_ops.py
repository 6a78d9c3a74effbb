"""The ops that pages are given: those asked for, or an error that says why not."""

from __future__ import annotations

import pytest
import torch

import hf_paged_native as native
from hf_paged.kv import Layout
from hf_paged.kv.ops import Ops, choose

LAYOUT = Layout(torch.device("cpu"), torch.float32, 2, 8, 8)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (LAYOUT._replace(device=torch.device("cuda", 0)), "made for CPUs, the keys are on cuda:0"),
        (LAYOUT._replace(dtype=torch.float64), "the keys are torch.float64"),
    ],
)
def test_pages_it_does_not_know(layout: Layout, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        choose("native", layout, captured=False)


@pytest.mark.parametrize("captured", [False, True])
def test_torch_stays_torch(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find", lambda: pytest.fail("somebody looked for the op"))
    assert type(choose("torch", LAYOUT, captured)) is Ops
