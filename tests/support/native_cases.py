"""The C++ op of CPUs on the cases of kernels."""

from __future__ import annotations

import torch
from kernel_cases import Case, ints

import hf_paged_native as native


def attend(
    library: native.Library, case: Case, tokens: int = 1, groups: torch.Tensor | None = None
) -> torch.Tensor:
    """The op's answer to the case: [query tokens, query heads, value_dim]."""
    rows, size = len(case.lengths), case.block_size
    query = case.query.unflatten(0, (rows, tokens)).transpose(1, 2)
    keys, values = case.keys.flatten(0, 1), case.values.flatten(0, 1)
    plan = native.Attend(library, query, keys, values, size, case.window, case.causal)
    plan.update(case.table, ints(case.lengths), groups)
    plan._scratch.fill_(torch.nan)
    return plan.run(query, keys, values, softcap=case.softcap, sinks=case.sinks).flatten(0, 1)
