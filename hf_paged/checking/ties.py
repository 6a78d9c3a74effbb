"""When two answers are the same up to rounding: logits agree, and tokens part only where the two best ones
are a tie.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList

NOISE = {torch.float32: 2e-4, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""How far two ways of computing a logit may lie apart, relative to the largest one."""
BEAMS = 4
"""Scores of beams add up logits of many steps: so many times as far they may lie apart."""
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""In what a model says what it would say without rounding."""


def size_of(logits: torch.Tensor) -> float:
    """The largest of some logits, at least 1: what differences are measured by."""
    finite = logits[logits.isfinite()]
    return max(1.0, finite.abs().max().item()) if finite.numel() else 1.0


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two sets of logits, relative to the largest logit of the first; NaN or
    infinity if only one is finite.
    """
    return torch.where(one == other, 0, (one - other).abs()).max().item() / size_of(one)


def lead(logits: torch.Tensor, token: int, other: int, size: float) -> float:
    """By how much one token leads another in logits [vocabulary], relative to a size."""
    return abs(logits[token].item() - logits[other].item()) / size


def is_tie(gap: float, noise: float) -> bool:
    """True if rounding may exchange two tokens that are so far apart: either of the two may be off by the
    noise.
    """
    return gap <= 2 * noise


class Verdict(NamedTuple):
    """The comparison of two answers to one call."""

    mark: str
    """"=" the same tokens, "~" tokens that part at ties, "X" others, or numbers that rounding does not
    explain.
    """
    apart: float
    """The largest difference of two logits, relative to the row's largest logit (at least 1)."""
    compared: int
    """How many steps of all rows were compared."""
    why: str = ""


def judge(
    stock: Any,
    paged: Any,
    prompt: int,
    noise: float,
    comparable: list[float] | None = None,
    drawn: bool = False,
) -> Verdict:
    """Row by row: logits agree up to the first token that differs, and there the two tokens are a tie.

    Row i is compared up to the step `comparable[i]`. Draws may fall on the other side of a rounded
    probability, tie or not.
    """
    logits = [torch.stack(answer.logits, 1).float() for answer in (stock, paged)]
    mark = "="
    most = 0.0
    compared = 0
    for row in range(stock.sequences.shape[0]):
        ours = paged.sequences[row, prompt:]
        theirs = stock.sequences[row, prompt:]
        steps = min(ours.numel(), theirs.numel(), logits[0].shape[1], logits[1].shape[1])
        if comparable is not None:
            steps = int(min(steps, comparable[row]))
        if not steps:
            continue
        different = (ours[:steps] != theirs[:steps]).nonzero().flatten().tolist()
        last = different[0] if different else steps - 1
        one = logits[0][row, : last + 1]
        other = logits[1][row, : last + 1]
        found = relative_difference(one, other)
        most = max(most, found)
        compared += last + 1
        if not found <= noise:  # which a NaN is not, either
            return Verdict(
                "X",
                found,
                compared,
                f"row {row}: logits differ by {found:.1e} of the largest, rounding explains {noise:.1e}",
            )
        if different and not drawn:
            gap = lead(one[last], int(theirs[last]), int(ours[last]), size_of(one))
            if not is_tie(gap, noise):
                return Verdict(
                    "X",
                    found,
                    compared,
                    f"row {row}: {ours.tolist()} instead of {theirs.tolist()}, and {gap:.1e} is no tie",
                )
            mark = "~"
    return Verdict(mark, most, compared)


def scores_apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two searches' scores [hypotheses], relative to their size."""
    return ((one - other).abs() / (1 + one.abs())).max().item()


# ---- what rounding explains


class Follow(LogitsProcessor):
    """Make generate() choose given tokens [rows, steps], and keep the scores that it would have chosen by.

    keep: the step of each row whose scores [vocabulary] are kept.
    """

    def __init__(self, tokens: torch.Tensor, keep: Mapping[int, int] | None = None) -> None:
        self.tokens = tokens
        self.keep = keep or {}
        self.kept: dict[int, torch.Tensor] = {}
        self.said = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, step in self.keep.items():
            if step == self.said:
                self.kept[row] = scores[row].float().cpu()
        chosen = self.tokens[:, self.said, None].to(scores.device)
        self.said += 1
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def rounding(model: Any, arguments: dict[str, Any], stock: Any, prompt: int) -> float:
    """How far stock's own logits lie from those of the same weights in a wider format on the same tokens,
    relative to the largest.
    """
    wide = WIDER[model.dtype]
    twin = copy.deepcopy(model).to(wide)
    given = {
        name: x.to(wide) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    follow = LogitsProcessorList([Follow(stock.sequences[:, prompt:])])
    exact = torch.stack(twin.generate(**given, logits_processor=follow).logits, 1)
    own = torch.stack(stock.logits, 1).to(exact.dtype)
    size = own.masked_fill(~own.isfinite(), 0).abs().amax((1, 2), keepdim=True).clamp(min=1)
    return (torch.where(own == exact, 0, (own - exact).abs()) / size).max().item()
