"""The float64 reference that the kernels are held to, cases to hold them with, and a test of the reference
itself.

Without a GPU the kernels run in Triton's interpreter, as a copy of the package of its own: other tests never
meet it.
"""

from __future__ import annotations

import sys

import pytest
import torch
from kernel_cases import FOLDER, GPU, Case, load
from torch.nn.functional import scaled_dot_product_attention


def test_reference_agrees_with_sdpa() -> None:
    case = Case([7], [7], heads=2, group=2, key_dim=16, block_size=4)
    k, v = (data[case.table[0].long()].flatten(0, 1)[:7].double() for data in (case.keys, case.values))
    q, k, v = (
        x.double().transpose(0, 1)[None]
        for x in (case.query, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    )
    torch.testing.assert_close(
        case.expected(), scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    )


def test_reference_gives_zero_where_nothing_is_seen() -> None:
    assert Case([0, 5], starts=[0, 5], with_sinks=True).expected().count_nonzero() == 0


def test_the_folder_of_the_kernels_is_no_package() -> None:
    """PyPI's `kernels`, which transformers imports, must stay importable beside it."""
    assert not (FOLDER.parent / "__init__.py").exists()


@pytest.mark.skipif(GPU, reason="the interpreted copy is the CPU's")
def test_the_interpreted_copy_is_not_the_package() -> None:
    assert load() is not sys.modules.get("hf_paged_kernels")
