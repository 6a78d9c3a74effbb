"""Arguments of a decoder's call that are compared with those of a text."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_paged.engine.worker.merging import same

MASK = torch.tensor([False, True, True, False, False, True, False])


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (None, None, True), (1, 1, True), (1, True, False), ("a", "b", False), (MASK, MASK.clone(), True), (MASK, MASK.long(), False),
        (MASK, MASK[:3], False), ({"a": MASK, "b": None}, {"a": MASK, "b": None}, True), ({"a": MASK}, {"a": ~MASK}, False),
        ({"a": 1}, {"b": 1}, False), ([1, MASK], [1, MASK], True), ((1, 2), (1,), False), (DynamicCache(), DynamicCache(), True),
        (object(), object(), False), (None, MASK, False),
    ],
)  # fmt: skip
def test_what_says_the_same(one: object, other: object, equal: bool) -> None:
    assert same(one, other) is equal
