"""Where prompts of generate() leave snapshots of their recurrent states, and which rows begin behind one.

A state covers all tokens before it, so a prompt is computed in parts that end where others are likely to part
from it. Books ask the kinds: layers without states have blocks that fill.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..blocks import Prompt
from ..blocks.prefix_lookup import worth_a_state
from ..kv import Sequences
from ..kv.config import CacheConfig
from ..kv.prefixes import parting
from ..kv.state_rows import StateRows
from ..model.slots import STATES, slots_of
from ..model.state_functions import WITHOUT_PAST, StateFunctions
from ..model.state_spans import PARAMETERS


def rows_of_states(sequences: Sequences) -> list[StateRows]:
    """The rows of recurrent states: one, or none."""
    return [rows for rows in sequences.rows.values() if isinstance(rows, StateRows)]


def goes_on(model: nn.Module) -> bool:
    """True if all layers with states call functions that are known to go on from those."""
    numbers = {number for number, _ in StateFunctions(model, PARAMETERS).called}
    slots = slots_of(model, cross=False)
    return all(number in numbers for number, slot in enumerate(slots) if STATES in slot.kinds)


def why_unnamed(sequences: Sequences, config: CacheConfig, model: nn.Module) -> str | None:
    """The reason why these rows find and leave nothing; None if they do."""
    for rows in rows_of_states(sequences):
        for reason in StateFunctions(model, WITHOUT_PAST).reasons:
            return f"a prompt in parts forgets its states: {reason}"
        if config.state_snapshots == 0:
            return "layers keep recurrent states, and state_snapshots=0"
        if rows.padded and len(sequences.rows) == 1:
            return "states of padded rows are behind more columns than tokens"
    return None


def stops_of(
    sequences: Sequences, config: CacheConfig, prompts: Sequence[Prompt], begin: int, most: int
) -> list[int]:
    """The columns behind `begin`, up to `most`, at which prompts leave snapshots before their ends: every
    `state_every` tokens, and where they part from what is cached.
    """
    if all(rows.padded for rows in rows_of_states(sequences)):
        return []
    every = config.state_every
    stops = {*range(begin - begin % every + every, most + 1, every)}
    parts_at = parting(sequences, prompts, most)
    if parts_at >= begin + worth_a_state(every):
        stops.add(parts_at)
    return sorted(stops)
