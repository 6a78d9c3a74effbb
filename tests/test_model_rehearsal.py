"""A rehearsal refuses all that a replay would get silently wrong, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged.model.lazy import NotCapturable
from hf_paged.model.rehearsal import Rehearsal

WEIGHT, INPUT, OUTSIDE = torch.randn(4, 4), torch.randn(2, 4), torch.randn(2, 4)
FLAGS, REPEATS = torch.tensor([True, False]), torch.tensor([1, 2, 1, 1])

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "item": (lambda: INPUT.sum().item(), "wait"),
    "bool": (lambda: bool(INPUT.sum() > 0), "wait"),
    "nonzero": (lambda: INPUT.nonzero(), "wait"),
    "where": (lambda: torch.where(INPUT > 0), "wait"),
    "mask as index": (lambda: INPUT[FLAGS], "wait"),
    "put by mask": (lambda: INPUT.clone().index_put_((FLAGS,), torch.zeros(4)), "wait"),
    "masked_select": (lambda: INPUT.masked_select(INPUT > 0), "wait"),
    "unique": (lambda: INPUT.unique(), "wait"),
    "repeats": (lambda: WEIGHT.repeat_interleave(REPEATS, dim=0), "wait"),
    "outside": (lambda: INPUT + OUTSIDE, "neither a weight nor an input"),
    "rand": (lambda: INPUT + torch.rand_like(INPUT), "random"),
    "dropout": (lambda: torch.nn.functional.dropout(INPUT, 0.5), "random"),
    "multinomial": (lambda: torch.multinomial(INPUT.abs(), 1), "random"),
}
TAKEN: dict[str, Callable[[], Any]] = {
    "products": lambda: (INPUT @ WEIGHT).softmax(-1).clamp(min=0.1),
    "made in the step": lambda: INPUT + torch.arange(4) * torch.zeros(4),
    "views": lambda: INPUT.view(4, 2)[1:].t() * 2,
    "index": lambda: WEIGHT[torch.zeros(2, dtype=torch.long)] + INPUT,
    "where": lambda: torch.where(INPUT > 0, INPUT, 0.0),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(*[INPUT.view(1, 1, 2, 4)] * 3),
    "nothing": lambda: INPUT + torch.empty(0).sum(),
    "repeats of known size": lambda: WEIGHT.repeat_interleave(2, dim=0),
}


def rehearse(step: Callable[[], Any]) -> Any:
    with Rehearsal([torch.device("cpu")], [WEIGHT, INPUT, FLAGS, REPEATS]):
        return step()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    step, why = REFUSED[name]
    with pytest.raises(NotCapturable, match=why):
        rehearse(step)


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str) -> None:
    torch.testing.assert_close(rehearse(TAKEN[name]), TAKEN[name]())


def test_tensors_elsewhere_are_refused() -> None:
    """A kernel gets a host's number once and for all: a capture for another device must not read it."""
    with pytest.raises(NotCapturable, match="on cpu"), Rehearsal([torch.device("cuda", 0)], [INPUT]):
        INPUT * 2
