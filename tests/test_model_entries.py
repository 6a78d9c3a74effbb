"""Entries of dicts: each change of an object, a tensor or a list among them is seen."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.model.entries import Entries


def test_every_change_is_seen() -> None:
    own: dict[str, Any] = {"weight": torch.nn.Parameter(torch.ones(4, 2)), "scale": 2.0, "ids": [1, 2]}
    absent: dict[str, Any] = {}
    given = [*((own, key) for key in own), (absent, "weight")]

    def write() -> None:
        with torch.no_grad():
            own["weight"].mul_(2)

    changes = (
        write,
        lambda: setattr(own["weight"], "data", own["weight"].data.clone()),
        lambda: setattr(own["weight"], "data", own["weight"].data[:2]),
        lambda: own.update(weight=torch.nn.Parameter(own["weight"].data)),
        lambda: own.update(scale=3.0),
        lambda: own["ids"].append(3),
        lambda: absent.update(weight=None),
        lambda: own.pop("scale"),
    )
    for change in changes:
        found = Entries(given)
        assert found.same()
        assert found.cover([own["weight"]])
        assert not found.cover([torch.ones(1)])
        change()
        assert not found.same()
