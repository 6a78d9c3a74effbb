"""A fourth kind of layers, as a stranger would add it: what recurrent layers keep of a sequence."""

from __future__ import annotations

from hf_paged.blocks import LayerKind


class State(LayerKind):
    """Every token updates what all before it have come to: one block for a sequence of any length."""

    __slots__ = ()
    name = "state"
    fills = False
