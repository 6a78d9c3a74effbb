"""Stand-ins for a layer's cache while it is traced: what attention is given that they do not know is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.model.traced import NotCompilable, Place, attend_traced

QUERY = torch.zeros(1, 2, 1, 4)


def test_keys_carry_their_place_to_attention() -> None:
    place = Place(torch.zeros(1), 7, False)
    key, value = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4)
    stored, given = place.update(key, value, 0, {})
    assert stored.key is key
    assert stored.place is place
    assert given is value


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"attention_bias": 0.5}, "given attention_bias"),
        ({"position_bias": torch.zeros(1)}, "given position_bias"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_other_attention_is_not_compiled(given: dict[str, Any], why: str) -> None:
    stored, value = Place(torch.zeros(1), None, False).update(QUERY, QUERY)
    with pytest.raises(NotCompilable, match=why):
        attend_traced(QUERY, stored, value, given)
