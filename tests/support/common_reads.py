"""A stand-in for kernels that read common blocks once, on CPUs: torch reads them for each row, and in each layer of a
captured step what the kernels are told of groups is held to the rows' tables.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from captures import policy
from kernel_cases import load
from tape import rerun

from hf_paged.engine.worker import adapters
from hf_paged.kv import ops
from hf_paged.model.capture import fusion
from hf_paged.model.rehearsal import RECORDERS


class CommonInTorch(ops.Ops):
    """Plain torch, which is told of groups as kernels are."""

    kernels = "a stand-in"
    wrong: ClassVar[list[tuple[int, int]]] = []
    """Rows that are in groups with others' blocks: an error here would only have the step computed anew."""

    def attend(self, query: torch.Tensor, pages: Any, *given: Any, **options: Any) -> torch.Tensor:
        groups = pages.batch.groups_on(query.device)
        if groups is not None:
            self.wrong += _not_common(
                groups.tolist(), pages.batch.table(query.device).tolist(), pages.batch.block_size
            )
        return super().attend(query, pages, *given, **options)


def _not_common(groups: list[list[int]], table: list[list[int]], block_size: int) -> list[tuple[int, int]]:
    """Rows that have not the first member's blocks where their group reads, and the number of the group."""
    found = []
    members = [place for entry in groups for place in entry[6:]]
    for row, entry in enumerate(groups):
        number = entry[5]
        while number:
            first, _, begin, end, number = groups[number - 1][:5]
            common = slice(begin // block_size, end // block_size)
            if table[row][common] != table[members[first]][common]:
                found.append((row, number))
    return found


def read_common_blocks_once(monkeypatch: pytest.MonkeyPatch, with_adapters: bool) -> list[tuple[int, int]]:
    """Capture an engine's steps from the second of a size on; the answer is `wrong`. with_adapters: they need kernels
    of their own for it, which are interpreted.
    """
    CommonInTorch.wrong.clear()
    policy(monkeypatch, after=1, least_steps=1)
    monkeypatch.setitem(RECORDERS, "cpu", rerun)
    monkeypatch.setattr(ops, "why_no_kernels", lambda layout: None)
    monkeypatch.setattr(ops, "TritonOps", CommonInTorch)
    if with_adapters:
        monkeypatch.setattr(adapters, "triton_package", lambda *given: load())
    make = fusion.Fusion.__init__
    monkeypatch.setattr(fusion.Fusion, "__init__", lambda self, model, kernels: make(self, model, None))
    return CommonInTorch.wrong
