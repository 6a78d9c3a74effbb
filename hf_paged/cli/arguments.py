"""Arguments that several commands have: the model, and how tokens are drawn."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from ..serve.link.loading import Source


def source_of(given: argparse.Namespace) -> Source:
    """The model of a command."""
    if given.device and given.device_map:
        raise ValueError("--device and --device-map both place the model; give one of them")
    names = [each.name for each in fields(Source) if hasattr(given, each.name)]
    return Source(**{name: getattr(given, name) for name in names})


def sampling_of(given: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `submit()` by which tokens are drawn, or are the likeliest ones."""
    drawn = {name: getattr(given, name) for name in ("top_p", "top_k", "seed")}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    if given.temperature > 0:
        return {"do_sample": True, "temperature": given.temperature, **drawn}
    if drawn:
        flag = "--" + next(iter(drawn)).replace("_", "-")
        raise ValueError(f"{flag} is for answers that are drawn; give --temperature above 0, or leave it out")
    return {"do_sample": False}
