"""The path that attention takes to each layer of a family, in words, and the file that says what it was."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from hf_paged.generate.cache import PagedCache
from hf_paged.model.cache_name import CACHE, OLDER
from hf_paged.model.layer import PagedLayer
from hf_paged.model.slots import NO_CONTENT
from hf_paged.model.state_layers import StateLayer

EXPECTED_FILE = Path(__file__).with_name("expected_paths.json")
SINCE_5_24 = {"causal gptj": "2 full paged"}
"""Paths that differ from transformers 5.24 on, where more families call an attention that can be chosen."""


def path_of(parts: list[PagedCache]) -> str:
    """Kinds of layers, how many there are of each, and how attention last read them: "1 full paged, 1 window
    paged; 2 cross paged".
    """
    return "; ".join(", ".join(_told(part)) for part in parts)


def _told(part: PagedCache) -> list[str]:
    counts: Counter[str] = Counter()
    for layer in part.layers:
        if isinstance(layer, PagedLayer):
            counts[f"{layer.kind.name} {layer.path}{'' if layer.complete else ' and more'}"] += 1
        elif isinstance(layer, StateLayer):
            kept = layer.complete and not layer.states.is_unused
            counts["state in slots" if kept else "state stock"] += 1
        elif type(layer) not in NO_CONTENT:
            counts[f"{type(layer).__name__} stock"] += 1
    return [f"{count} {name}" for name, count in sorted(counts.items())]


def expected_paths() -> dict[str, str]:
    """For each "kind family" the path that it had when the file was written, or has since."""
    paths: dict[str, str] = json.loads(EXPECTED_FILE.read_text())
    return paths if CACHE == OLDER else paths | SINCE_5_24
