"""Stand-ins for a decoder layer's cache while it is traced: plain Python around plain tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

PASSED_ALONG = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_router_logits",
        "output_hidden_states",
        "sliding_window",
        "cache_position",
        "logits_to_keep",
    }
)
"""Keywords that reach every attention function and add nothing to the mask."""
UNDERSTOOD = PASSED_ALONG | {"scaling", "dropout", "softcap", "s_aux", "is_causal", "position_bias"}
"""Keywords that attention over pages has words for."""


class NotCompilable(RuntimeError):
    """Why the layers of a model run as they are."""


class Rotated(NamedTuple):
    """A query or a key in a traced layer that gets its position where it is stored."""

    x: torch.Tensor
    """[rows, heads, new, dim]"""
    cos: torch.Tensor
    sin: torch.Tensor


class Place:
    """The stand-in for a traced layer's cache: which layer it is, in a tensor, so that one code serves all
    layers.
    """

    def __init__(self, tag: torch.Tensor, window: int | None, drops_caps: bool) -> None:
        self.tag = tag
        self.window = window
        self.drops_caps = drops_caps

    def update(self, key: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Stored, torch.Tensor]:
        """Nothing yet: the attention stores them."""
        return Stored(key, self), value


class Stored(NamedTuple):
    """The keys' stand-in on the way to the attention function."""

    key: Any
    """The step's keys [rows, heads, new, dim], rotated or not."""
    place: Place


def attend_traced(query: Any, stored: Stored, value: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """Store and attend in a layer that is being traced: [rows, new, heads, value_dim]."""
    for name, setting in kwargs.items():
        if (
            (name not in UNDERSTOOD or name == "position_bias")
            and setting is not None
            and setting is not False
        ):
            raise NotCompilable(f"its attention is given {name}")
    if kwargs.get("is_causal") is False:
        raise NotCompilable("its attention is not causal")
    key = stored.key
    place = stored.place
    cos = sin = None
    if isinstance(query, Rotated) and isinstance(key, Rotated):
        cos = query.cos
        sin = query.sin
        query = query.x
        key = key.x
    softcap, sinks = (None, None) if place.drops_caps else (kwargs.get("softcap"), kwargs.get("s_aux"))
    out: torch.Tensor = torch.ops.hf_paged.attend(
        query, key, value, cos, sin, sinks, place.tag, kwargs.get("scaling"), softcap, place.window
    )
    return out
