"""Rows that have ended leave the steps of a call.

Stock gives a row that has ended the pad token, whatever its logits are. So it need not be computed, unless
something looks at more of it than its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..model.outputs import asked_fields
from ..model.routers import routers_of
from .cache import PagedCache
from .dedupe import adapter_keywords, has_axes, has_rows_only, keeps_another_cache
from .ended import ComputedRows, EndedRows
from .padding import new_of, rows_of
from .states import follow_rows

OWN = ("transformers.generation.logits_process", "transformers.generation.stopping_criteria")
"""The modules of processors and criteria that know each row by itself."""
LOOP = "the loop is neither greedy decoding nor sampling"
STEP = "a step asks for more than logits, or holds what does not follow its rows"
DEVICES = ("cpu", "cuda")
"""Devices on which stock's loop waits for its criteria in every step."""


def watched(
    model: nn.Module,
    parts: Sequence[PagedCache],
    made: bool,
    generation_config: Any,
    ids: torch.Tensor,
    processors: Sequence[Any],
    criteria: Any,
) -> Any:
    """The criteria of a sampling or greedy loop, which note ended rows if these may leave its steps. made:
    whether the call has made its cache, of these parts, or was given it.
    """
    reason: str | None = "the cache was handed in"
    if made:
        reason = _why_rows_stay(model, parts, generation_config, ids, processors, criteria)
    parts[0].sequences.memory.rows_stay = reason
    if reason is not None:
        return criteria
    parts[0].ended = EndedRows(criteria, len(ids))
    return parts[0].ended


def _why_rows_stay(
    model: Any,
    parts: Sequence[PagedCache],
    generation_config: Any,
    ids: torch.Tensor,
    processors: Sequence[Any],
    criteria: Sequence[Any],
) -> str | None:
    """Why all rows of a call are computed until the last one ends; None if ended rows may leave."""
    config = parts[0].config
    kind: Any = type(model)
    foreign = [type(each) for each in (*processors, *criteria) if type(each).__module__ not in OWN]
    reasons = {
        "drop_ended is 'off'": config.drop_ended == "off",
        "the batch has one row": ids.ndim != 2 or len(ids) < 2,
        "no criterion names an EOS token, so ended rows show tokens": not any(
            hasattr(each, "eos_token_id") for each in criteria
        ),
        "the answer has the cache (return_dict_in_generate)": generation_config.return_dict_in_generate,
        "prefix_caching keeps what all rows hold": config.prefix_caching,
        f"{foreign[0].__name__ if foreign else ''} is not transformers' own": bool(foreign),
        "an assistant drafts for another call": generation_config.is_assistant,
        "its cross attention has stock's cache": model.config.is_encoder_decoder and len(parts) < 2,
        "the model keeps a second cache": keeps_another_cache(kind),
        "a router counts the tokens that are computed together": bool(routers_of(model, again=True).modules),
        f"the loop does not wait for {ids.device}": ids.device.type not in DEVICES,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def rows_of_step(
    model: nn.Module, arguments: Mapping[str, Any], parts: Sequence[PagedCache]
) -> ComputedRows | None:
    """The rows that a step computes, because the others have ended; None for all."""
    ended = parts[0].ended
    computed = None if ended is None else ended.rows_of_step()
    if ended is None or computed is None:
        return None
    sequences = parts[0].sequences
    moves = sequences.sources is not computed.sources
    held = sequences.count if sequences.sources is None else len(sequences.sources)
    if not _takes_rows(model, arguments, len(computed.sources), held) or (
        moves and not follow_rows(model, list(parts), sequences.count)
    ):
        sequences.memory.rows_stay = STEP
        parts[0].ended = None  # rows that have left get the place of another, and are computed as that
        return None
    if moves:
        ended.hooked = list(adapter_keywords(model))
        ended.padded |= sequences.starts is not None
    return computed


def _takes_rows(model: nn.Module, arguments: Mapping[str, Any], rows: int, held: int) -> bool:
    """True if a forward is a step of the call's rows that can be computed for some of them. held: the rows
    for which the cache stands.
    """
    return (
        (rows_of(arguments), new_of(arguments), held) == (rows, 1, rows)
        and has_rows_only(arguments)
        and not any(has_axes(name, value) for name, value in arguments.items())
        and asked_fields(model, arguments) is None
    )
