"""A family that was on pages stays on pages."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, VOCABULARY, Family, build

from hf_paged.generate.cache import paged_parts


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_path_of_every_layer(family: Family, padded: bool) -> None:
    """Attention reads each layer the way the family's entry says: from its pages, or (no registry) through a
    dense copy.
    """
    model = build(family)
    ids = torch.randint(5, VOCABULARY, (2, 9))
    mask = torch.ones_like(ids)
    if padded:
        mask[(0, slice(6, None)) if family.seq2seq else (0, slice(3))] = 0
    answer = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=8,
        num_beams=2,
        cache_implementation="paged",
        return_dict_in_generate=True,
    )
    parts = paged_parts(answer.past_key_values)
    assert len(parts) == 1 + family.seq2seq
    for part in parts:
        assert part.paths == [family.path] * 2


def test_both_kinds_of_layers_are_there() -> None:
    """The families with windows really alternate, so that two groups are tried."""
    windows = {}
    for family in FAMILIES:
        answer = build(family).generate(
            torch.full((1, 5), 7),
            max_new_tokens=2,
            cache_implementation="paged",
            return_dict_in_generate=True,
        )
        windows[family.name] = len(paged_parts(answer.past_key_values)[0].sequences.rows)
    assert {name for name, groups in windows.items() if groups == 2} == {
        "qwen2-window",
        "gemma2",
        "gemma3",
        "gpt-oss",
    }
