"""Eval mode for a while: afterwards a model is as it was, whatever its train() and eval() do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from interrupting import Interrupted
from torch import nn

from hf_paged.model.training import evaluating


class Merging(nn.Module):
    """Like the layers of loralib: eval() adds its product to the weight, train() takes it out."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.learned = nn.Parameter(torch.ones(8, 8))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.base.weight.data += -self.learned if mode else self.learned
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.base(x)
        return answer if self.merged else answer + x @ self.learned.t()


def model_of(*frozen: int) -> Any:
    """Two such layers in training mode, with those of some numbers in eval mode."""
    model = nn.Sequential(Merging(), Merging())
    for number in frozen:
        model[number].eval()
    return model


def assert_like(model: Any, other: Any) -> None:
    """The same weights, up to what was added and taken out, and the same modes."""
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-6)
    modes = [[module.training for module in each.modules()] for each in (model, other)]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("frozen", [(), (0,), (0, 1)])
def test_what_eval_does_is_undone(frozen: tuple[int, ...]) -> None:
    model = model_of(*frozen)
    before = copy.deepcopy(model)
    with evaluating(model):
        assert all(layer.merged and not layer.training for layer in model)
    assert [layer.merged for layer in model] == [number in frozen for number in range(2)]
    assert_like(model, before)


def test_a_part_of_two_modules() -> None:
    """Their modes are not the part's own."""
    shared = nn.Dropout()
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared).eval()])
    shared.train()
    with evaluating(model):
        assert not shared.training
    assert shared.training
    assert [part.training for part in model] == [True, False]


def test_an_interrupt_on_the_way() -> None:
    """C22: half of the modules are in eval mode then, on the way there or back."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Dropout()) for _ in range(2)))
    before = copy.deepcopy(model)

    def act() -> None:
        with evaluating(model):
            pass

    ours, torchs = ("/model/training.py",), ("/modules/module.py",)
    probe = Interrupted(files=ours, torch_files=torchs)
    assert probe(act)
    for at in range(1, probe.count + 1):
        interrupted = Interrupted(at, ours, torchs)
        assert not interrupted(act)
        assert_like(model, before)
