"""Shared by the tests and sweeps: ties between beams, and between experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear

from hf_paged.checking.ties import BEAMS, Verdict, scores_apart


def judge_beams(stock: Any, paged: Any, noise: float) -> Verdict:
    """The same sequences, or others with the same scores."""
    one = stock.sequences_scores.float()
    other = paged.sequences_scores.float()
    far = scores_apart(one, other)
    same = stock.sequences.shape == paged.sequences.shape and torch.equal(stock.sequences, paged.sequences)
    if not far <= BEAMS * noise:
        return Verdict(
            "X",
            far,
            len(one),
            f"scores {other.tolist()} instead of {one.tolist()}, rounding explains {BEAMS * noise:.1e}",
        )
    return Verdict("=" if same else "~", far, len(one))


@contextmanager
def router_margins(model: Any) -> Iterator[list[torch.Tensor]]:
    """For each call of a router by how much [tokens] its last chosen expert leads, in parts of its largest
    score.

    Rounding decides where that is nothing, and another expert is another function: no step after it can be
    compared.
    """
    margins: list[torch.Tensor] = []

    def margin(router: Any, arguments: Any, output: Any) -> None:
        tokens = arguments[0].reshape(-1, arguments[0].shape[-1]).float()
        bias = getattr(router, "bias", None)
        scores = linear(tokens, router.weight.float(), None if bias is None else bias.float())
        best = scores.sort(-1, descending=True).values
        margins.append(
            (best[:, router.top_k - 1] - best[:, router.top_k]) / (2 * scores.abs().amax(-1).clamp(min=1))
        )

    handles = [router.register_forward_hook(margin) for router in routers(model)]
    try:
        yield margins
    finally:
        for handle in handles:
            handle.remove()


def routers(model: Any) -> list[Any]:
    """The modules that choose experts."""
    return [module for module in model.modules() if hasattr(module, "top_k") and hasattr(module, "weight")]


def first_ties(
    margins: list[torch.Tensor], noise: float, mask: torch.Tensor, layers: int, steps: int
) -> list[float]:
    """The step at which each row meets its first tie between experts; infinity if it never does.

    `mask` [rows, columns] is the prompt's: its padding does not matter. Of the forwards the last `steps`
    answered, those before them were parts of the prompt.
    """
    rows = mask.shape[0]
    ties = [
        torch.stack([margin.view(rows, -1) < noise for margin in margins[i : i + layers]]).any(0)
        for i in range(0, len(margins), layers)
    ]
    prompts = len(ties) - steps + 1
    whole = torch.cat(ties[:prompts], 1)
    found = torch.stack([(whole & mask.bool()).any(1), *(tie.any(1) for tie in ties[prompts:])], 1)
    return [row.index(True) if True in row else torch.inf for row in found.tolist()]
