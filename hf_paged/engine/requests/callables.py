"""The answers of a user's criteria and processors, read as the loops of generate() read them."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .prompts import short

ANSWERS = "a bool, an int, or booleans in a tensor [rows]"
"""Answers that a stopping criterion may give."""


def stops(criterion: Any, ids: torch.Tensor, beams: bool, ends: bool) -> list[bool]:
    """True for each row of ids [rows, tokens] that a criterion stops.

    generate() joins the answers of all criteria by `|` and reads the lowest bit; beam search computes with
    booleans alone.
    ends: whether the request has end-of-sequence tokens. Without them generate() only checks whether all rows
        have stopped.
    """
    rows = ids.shape[0]
    with torch.no_grad():
        answer = criterion(ids, None)
    try:
        done = _joined(torch.zeros(rows, dtype=torch.bool, device=ids.device), answer)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{_refused(criterion, answer)}: {error}") from error
    if beams:
        # numpy's booleans become uint8 here, torch's own stay what they are.
        if done.shape != (rows,) or done.dtype not in (torch.bool, torch.uint8):
            raise TypeError(
                f"{_refused(criterion, answer)}; beam search takes a bool, or booleans in a tensor [{rows}]"
            )
        over = done.bool()
    else:
        over = torch.ones(rows, dtype=torch.long, device=ids.device) & ~done == 0
    if over.shape != (rows,):
        if ends:
            raise TypeError(f"{_refused(criterion, answer)}, which makes {list(over.shape)} of {rows} rows")
        over = over.all().expand(rows)
    found: list[bool] = over.tolist()
    return found


def _joined(none: torch.Tensor, answer: Any) -> torch.Tensor:
    """none | answer. An array of numpy's is joined by numpy, and its booleans become uint8, as torch does it;
    the way there by torch's `__array_wrap__` is deprecated.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(answer, numpy.ndarray):
        found = none.numpy() | answer
        return torch.from_numpy(found.astype("uint8") if found.dtype == bool else found)
    joined: torch.Tensor = none | answer
    return joined


def _refused(criterion: Any, answer: object) -> str:
    name = getattr(criterion, "__name__", type(criterion).__name__)
    return f"the stopping criterion {name} answered {short(answer)}, expected {ANSWERS}"


def checked_scores(answer: object, rows: int, vocabulary: int, drawn: bool, single: bool) -> torch.Tensor:
    """Scores [rows, tokens] as logits processors returned them.

    single: whether one row may stand for all. generate() broadcasts the chosen tokens to its rows if there
        are end-of-sequence tokens and no beams. A vocabulary may be cut, and may be longer if no token beyond
        its end is chosen.
    """
    if not isinstance(answer, torch.Tensor):
        raise TypeError(
            f"the logits processors returned {short(answer)}, expected a tensor [{rows}, {vocabulary}]"
        )
    leading = tuple(answer.shape[:-1])
    alike = single and (leading == (1,) or (leading == () and answer.ndim == 1 and not drawn))
    if leading != (rows,) and not alike:
        raise ValueError(
            f"the logits processors returned scores {list(answer.shape)} of {[rows, vocabulary]}; they must "
            "keep the shape"
        )
    return answer.expand(rows, answer.shape[-1])


def require_known(tokens: list[int], vocabulary: int, scores: torch.Tensor) -> list[int]:
    """Tokens chosen by processed scores, if all of them are in the model's vocabulary."""
    if max(tokens) >= vocabulary:
        raise ValueError(
            f"the logits processors returned scores {list(scores.shape)} in which token {max(tokens)} is the "
            f"next one, and the model has {vocabulary} tokens; they must keep the shape"
        )
    return tokens
